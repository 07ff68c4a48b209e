"""Moves weights between HuggingFace checkpoints and the ranks' shards; no rank ever holds the whole model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from converters.architectures import Architecture
from converters.copying import check_structure, check_tensors, copy_transfers, read_into
from converters.durable import sync_all
from converters.errors import UserError
from converters.formats.safetensors import (
    HuggingFaceCheckpoint,
    create_checkpoint,
    finish,
    open_for_writing,
    partial_folder,
)
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.plan import plan
from megatron_ext.model.backbone import Backbone
from megatron_ext.model.model import local_tensors
from megatron_ext.model.specs import module_names

_SHARD_SIZE_BYTES = 5 * 10**9


def load_huggingface(
    chunks: Sequence[Backbone],
    architecture: Architecture,
    parallel: ParallelSizes,
    rank: int,
    checkpoint: HuggingFaceCheckpoint,
) -> None:
    """Fill this rank's chunks from `checkpoint`, reading only this rank's part.

    Tensors that the checkpoint may lack, such as a value head, become 0 if they are missing.

    Raises UserError if the checkpoint's tensors are not those of the architecture, or hold a NaN or an infinity.
    """
    # Copies of weights are not compared here: one process did that, and each of thousands would have to read them
    # whole.
    check_structure(checkpoint, architecture)
    shard = megatron_layout(architecture, parallel.unsharded, module_names=module_names(chunks[0].config)).shard(rank)
    tensors = local_tensors(chunks)
    check_tensors(shard.local_shapes, tensors)
    missing = architecture.hf_zero_if_missing - checkpoint.shapes.keys()
    absent = {each.local_name for each in shard.placements if each.hf_name in missing}
    read_into(
        checkpoint,
        [each for each in shard.placements if each.hf_name not in missing],
        {name: tensor for name, tensor in tensors.items() if name not in absent},
    )
    with torch.no_grad():
        for name in absent:
            tensors[name].zero_()
    hf_names = {each.local_name: each.hf_name for each in shard.placements}
    check_finite(
        {f"{hf_names[name]}, or what lies beside it in {name},": each for name, each in tensors.items()},
        checkpoint.folder,
    )


def check_finite(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Raise UserError if a tensor, read from `folder`, has a NaN or an infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(
                f"the weights of {folder} are damaged: {name} holds a NaN or an infinity; copy the model again, or "
                "begin with an earlier checkpoint"
            )


def export_huggingface(
    chunks: Sequence[Backbone],
    architecture: Architecture,
    parallel: ParallelSizes,
    rank: int,
    folder: Path,
    copy_from: Path,
    barrier: Callable[[], object],
    dtype: torch.dtype | None = None,
    shard_size_bytes: int = _SHARD_SIZE_BYTES,
) -> None:
    """Write the weights of all ranks to `folder` as a HuggingFace checkpoint; every rank calls this.

    Each rank writes its own part into files that all of them map; `folder` appears once it is complete. The config is
    that of the architecture, and the tokenizer that of the model folder `copy_from`. `barrier` waits for all ranks.
    `dtype` is the dtype of the written weights; None keeps the model's.

    Raises UserError if `folder` exists or the disk is full.
    """
    partial = partial_folder(folder)
    tensors = local_tensors(chunks)
    if rank == 0:
        dtypes = architecture.hf_dtypes(dtype or next(chunks[0].parameters()).dtype)
        create_checkpoint(partial, architecture.hf_shapes, dtypes, shard_size_bytes)
    barrier()
    source = megatron_layout(architecture, parallel, module_names=module_names(chunks[0].config))
    transfers = plan(source, huggingface_layout(architecture.hf_shapes))
    copy_transfers([each for each in transfers if each.source_rank == rank], tensors, open_for_writing(partial))
    # Only this machine can write its cached pages to disk, and rank 0 must not rename the folder before.
    sync_all(partial)
    barrier()
    if rank == 0:
        finish(partial, folder, copy_from=copy_from, config=architecture.hf_config)
    barrier()
