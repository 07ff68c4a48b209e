"""Program of the ranks of a parity test: the same model and tokens under any parallel sizes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from parallel_rank import parallel_rank
from torch import Tensor

from converters.architectures import read_architecture
from converters.copying import copy_transfers
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.huggingface import huggingface_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.plan import plan
from megatron_ext.model.backbone import LanguageModel
from megatron_ext.model.model import build_model, local_tensors
from megatron_ext.optimizer.optimizer import wrap_distributed
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, pack
from megatron_ext.weights import load_huggingface

# Micro-batches of different lengths, with sequences of one token and two of the same length.
BATCHES = ((5, 12, 1, 33, 12), (40, 3), (1,), (17, 130, 2, 2))
VOCABULARY = 63


def sequences() -> list[list[Tensor]]:
    """The token ids of every sequence of every micro-batch."""
    generator = torch.Generator().manual_seed(7)
    return [[torch.randint(4, VOCABULARY, (n,), generator=generator) for n in lengths] for lengths in BATCHES]


def loaded_model(
    rank: int,
    sizes: ParallelSizes,
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    params_dtype: torch.dtype = torch.float32,
) -> list[torch.nn.Module]:
    checkpoint = HuggingFaceCheckpoint(folder)
    architecture = read_architecture(checkpoint.config)
    chunks = build_model(architecture, sizes, params_dtype=params_dtype, overrides=overrides)
    with torch.no_grad():
        for tensor in local_tensors(chunks).values():
            tensor.fill_(float("nan"))
    load_huggingface(chunks, architecture, sizes, rank, checkpoint)
    return chunks


def logits(rank: int, sizes: ParallelSizes, folder: Path) -> tuple[int, list[Tensor]]:
    """This rank's tensor-parallel rank and its columns of the logits of each micro-batch; [] before the last stage."""
    return parallel_rank().tensor, computed_logits(loaded_model(rank, sizes, folder), sizes)


def computed_logits(chunks: Sequence[torch.nn.Module], sizes: ParallelSizes) -> list[Tensor]:
    """This rank's columns of the logits of each micro-batch; [] before the last stage."""
    collected: list[Tensor] = []

    def collect(model: LanguageModel, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        collected.append(_logits(model, hidden)[: micro_batch.real_tokens])
        return hidden

    with torch.no_grad():
        _run(chunks, sizes, sequences(), collect, forward_only=True, collect_non_loss_data=True)
    return collected


def _logits(model: LanguageModel, hidden: Tensor) -> Tensor:
    """Logits of the head, whole: this rank's columns of [tokens, vocabulary]."""
    head = model.output_layer
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    tied = model.share_embeddings_and_output_weights
    logits = hidden[:, 0] @ (model.shared_embedding_or_output_weight() if tied else head.weight).T
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def of_each(
    rank: int, sizes: ParallelSizes, function: Callable[..., Any], folders: Mapping[str, Path]
) -> dict[str, Any]:
    """Results of `function`, `logits` or `gradients`, for each of several models: one launch of the ranks for all."""
    return {name: function(rank, sizes, folder) for name, folder in folders.items()}


def gradients(
    rank: int,
    sizes: ParallelSizes,
    folder: Path,
    overrides: Mapping[str, Any] | None = None,
    params_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """This rank's share of the gradient of the summed loss over all data-parallel ranks, in HuggingFace names.

    Summed over ranks the shares are the whole gradient; elements of other ranks are 0.
    """
    chunks = loaded_model(rank, sizes, folder, overrides, params_dtype)
    wrapped = wrap_distributed(chunks, {"use_distributed_optimizer": False}, fully_sharded=False)
    chunks[0].config.finalize_model_grads_func = lambda model, _tokens, **groups: finalize_model_grads(
        model, None, **groups
    )

    def lose(model: LanguageModel, hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, dict]:
        predictions = model.predict_labels(hidden, micro_batch.labels[0], temperature=0.5)
        weights = torch.linspace(0.5, 1.5, micro_batch.real_tokens)
        real = slice(micro_batch.real_tokens)
        loss = (predictions.log_probs[real] * weights + predictions.entropy[real] / weights).sum()
        return loss, torch.zeros((), dtype=torch.int), {}

    mine = sequences()[parallel_rank().data :: sizes.data_parallel_size]
    _run(wrapped, sizes, mine, lose, forward_only=False)
    return in_huggingface_names(rank, sizes, folder, chunks)


def in_huggingface_names(
    rank: int, sizes: ParallelSizes, folder: Path, chunks: Sequence[torch.nn.Module]
) -> dict[str, Tensor]:
    local = {
        name: getattr(tensor, "main_grad", torch.zeros_like(tensor)) for name, tensor in local_tensors(chunks).items()
    }
    architecture = read_architecture(HuggingFaceCheckpoint(folder).config)
    shapes = architecture.hf_shapes
    share = {name: torch.zeros(shape) for name, shape in shapes.items()}
    transfers = plan(megatron_layout(architecture, sizes, module_names="local"), huggingface_layout(shapes))
    copy_transfers([each for each in transfers if each.source_rank == rank], local, share)
    return share


def _run(
    chunks: Sequence[torch.nn.Module], sizes: ParallelSizes, batches: list[list[Tensor]], consume: Any, **options: Any
) -> None:
    packed = [
        pack(
            RaggedBatch(torch.cat(batch), torch.tensor([len(tokens) for tokens in batch]), {}),
            range(len(batch)),
            sizes.tensor_model_parallel_size,
        )
        for batch in batches
    ]
    iterators = [iter(packed) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=partial(_step, consume=consume),
        data_iterator=iterators[0] if len(chunks) == 1 else iterators,
        model=chunks[0] if len(chunks) == 1 else list(chunks),
        num_microbatches=len(packed),
        seq_length=1,
        micro_batch_size=1,
        **options,
    )


def _step(micro_batches: Any, model: torch.nn.Module, *, consume: Any) -> tuple[Tensor, Any]:
    batch = next(micro_batches)
    parameters = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
    output = model(batch.tokens, batch.position_ids, None, packed_seq_params=parameters)

    def on_last_stage(hidden: Tensor, **_options: Any) -> Any:
        return consume(unwrap_model(model), hidden, batch)

    return output, on_last_stage
