"""Checks that a checkpoint has the model, number format and optimizer of the run that resumes from it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from converters.dtypes import dtype_name
from converters.errors import UserError
from converters.formats.torch_dist import StoredTensor, TorchDistCheckpoint, is_weight
from megatron_ext.optimizer.optimizer_shards import PREFIX


class _Wanted(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_vocabulary: bool
    """Whether rows are padded for the layout, so that the checkpoint may have more or fewer."""


def require_fit(wanted: Mapping[str, Any], checkpoint: TorchDistCheckpoint, vocab_size: int) -> None:
    """Collective: raise the same UserError on all ranks unless the checkpoint has what every rank needs.

    `wanted` is a sharded state dict of megatron-core's. Layers, widths and dtypes must be equal, and the optimizer must
    keep the same state for the same weights.
    """
    of_ranks: list[dict[str, _Wanted]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(of_ranks, dict(_tensors(wanted)))
    everywhere = {key: each for of_rank in of_ranks for key, each in of_rank.items()}
    folder, stored = checkpoint.folder, checkpoint.contents.tensors
    weights = {key: each for key, each in everywhere.items() if is_weight(key)}
    if difference := next(_other_model(weights, stored, vocab_size), None):
        raise UserError(
            f"{folder} is a checkpoint of another model: {difference}; take the model.path that it was written with, or"
            " another output_dir"
        )
    for key, each in weights.items():
        if stored[key].dtype != each.dtype:
            raise UserError(
                f"{folder} has {key} in {dtype_name(stored[key].dtype)}, and this run trains it in"
                f" {dtype_name(each.dtype)}: set model.dtype as it was, or begin a new run with the weights"
                " (model.megatron_checkpoint)"
            )
    for key in sorted(everywhere.keys() & stored.keys()):
        # A checkpoint may store main parameters as the remainder to bf16 weights, which reading would silently convert.
        if stored[key].dtype.is_floating_point != everywhere[key].dtype.is_floating_point:
            raise UserError(
                f"{folder} keeps {key} in {dtype_name(stored[key].dtype)}, and this run in"
                f" {dtype_name(everywhere[key].dtype)}: set megatron.use_precision_aware_optimizer and"
                " megatron.store_param_remainders as they were, or begin a new run with the weights"
                " (model.megatron_checkpoint)"
            )
    if missing := sorted(everywhere.keys() - stored.keys()):
        kinds = ", ".join(sorted({key.removeprefix(PREFIX).partition(".")[0] for key in stored if PREFIX in key}))
        kind, _, key = missing[0].removeprefix(PREFIX).partition(".")
        raise UserError(
            f"{folder} was written with another optimizer: it has no {kind} of {key}, but {kinds or 'no state'}; set"
            " megatron.optimizer as it was, or begin a new run with the weights (model.megatron_checkpoint)"
        )


def _tensors(wanted: Mapping[str, Any]) -> Iterator[tuple[str, _Wanted]]:
    for each in nested_values(wanted):
        pieces = nested_values(each.build()) if isinstance(each, ShardedTensorFactory) else [each]
        for piece in pieces:
            if isinstance(piece, ShardedTensor):
                yield piece.key, _Wanted(tuple(piece.global_shape), piece.dtype, piece.allow_shape_mismatch)


def _other_model(weights: Mapping[str, _Wanted], stored: Mapping[str, StoredTensor], vocab_size: int) -> Iterator[str]:
    """The ways in which the weights of a checkpoint are not those of the model."""
    for key, each in weights.items():
        if key not in stored:
            yield f"it has no {key}"
            continue
        there, here = stored[key].shape, each.shape
        fits = there[0] >= vocab_size and there[1:] == here[1:] if each.is_vocabulary else there == here
        if not fits:
            yield f"{key} is {list(there)} there, and {list(here)} here"
    for key in stored:
        if is_weight(key) and key not in weights:
            yield f"it has {key}, which this one has not"
