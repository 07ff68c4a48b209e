"""Weights of this rank's chunks as parts of a distributed checkpoint (torch_dist) of any layout."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel

from converters.architectures import Architecture, Part
from converters.copying import check_distributed
from converters.errors import UserError
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.layouts.chunk_names import chunk_names
from converters.layouts.torch_dist.keys import cells
from megatron_ext import versions
from megatron_ext.checkpoint.fp8_statistics import EXTRA_STATE, without_statistics
from megatron_ext.checkpoint.intact import require_intact
from megatron_ext.model.model import local_tensors
from megatron_ext.weights import check_finite


def load_distributed(chunks: Sequence[GPTModel], architecture: Architecture, folder: Path) -> None:
    """Collective: fill this rank's chunks from the torch_dist checkpoint in `folder`.

    The checkpoint may have any layout, padding of the vocabulary, and names (of Transformer Engine's modules or of
    megatron-core's local ones); its optimizer state is left alone. Layers for multi-token prediction may
    be in the checkpoint and not in the model. Padding becomes 0.

    Raises UserError, naming the key, where a tensor is missing, surplus, incomplete or of another shape than that of
    `architecture`, where a weight does not have its checksum, and where one holds a NaN or an infinity.
    """
    if architecture.head == "value":
        raise UserError(
            f"{folder} is a checkpoint in Megatron's format, from which a value model cannot begin: convert it to a"
            " HuggingFace folder and give that"
        )
    checkpoint = TorchDistCheckpoint(folder)
    check_distributed(checkpoint, architecture)
    uniform = not any(re.match(r"decoder\.layers\.\d", key) for key in checkpoint.weights)
    wanted = sharded(chunks, uniform=uniform)
    for chunk, tensors in zip(chunks, wanted.values(), strict=True):
        for name, key in transformer_engine_keys(chunk, architecture, uniform=uniform).items():
            if name in tensors and key in checkpoint.weights:
                tensors[name].key = key
    require_intact(checkpoint.folder, weights_only=True)
    loaded = versions.load_checkpoint(wanted, checkpoint.folder, _nothing_in_common)
    for chunk, name in zip(chunks, wanted, strict=True):
        different = chunk.load_state_dict(loaded[name], strict=False)
        if missing := [key for key in different.missing_keys if EXTRA_STATE not in key]:
            raise ValueError(f"megatron-core loads no {missing[0]}, one of {len(missing)} tensors")
    check_finite(local_tensors(chunks), checkpoint.folder)


def _nothing_in_common(_folder: str | Path) -> dict[str, Any]:
    # Not needed for weights, and it may need classes of the program that saved it.
    return {}


def sharded(chunks: Sequence[GPTModel], *, uniform: bool) -> dict[str, ShardedStateDict]:
    """This rank's weights as megatron-core saves and loads them: a state dict for each chunk, by its name.

    Raises UserError for multi-token prediction with tied embeddings over several pipeline stages.
    """
    for chunk in chunks:
        stages = chunk.config.pipeline_model_parallel_size
        if stages > 1 and chunk.config.mtp_num_layers and chunk.share_embeddings_and_output_weights:
            raise UserError(
                "megatron-core has no distributed checkpoints of multi-token prediction with tied embeddings over"
                f" {stages} pipeline stages; use pipeline_model_parallel_size 1"
            )
    # A fresh table for each chunk: megatron-core adds to it.
    states = [chunk.sharded_state_dict(metadata={"non_homogeneous_layers": not uniform}) for chunk in chunks]
    return dict(zip(chunk_names(len(chunks)), map(without_statistics, states), strict=True))


def transformer_engine_keys(chunk: GPTModel, architecture: Architecture, *, uniform: bool) -> dict[str, str]:
    """Name in a chunk of local modules -> key in a checkpoint with Transformer Engine's names.

    Without the experts, whose keys are the same.
    """
    local = {layer.layer_number - 1: index for index, layer in enumerate(chunk.decoder.layers)}
    for index in range(architecture.mtp_layers):
        local[architecture.num_layers + index] = index
    return {
        cell.parameter.megatron.format(layer=local.get(cell.layer)): cell.key
        for cell in cells(architecture, uniform=uniform)
        if not cell.parameter.is_expert and (cell.parameter.part is not Part.LAYERS or cell.layer in local)
    }
