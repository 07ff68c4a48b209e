"""Shards weights, gradients and optimizer state over data-parallel ranks by torch's FSDP2, in megatron-core's wrapper.

A rank holds some rows of every parameter; layers gather theirs one after the other as they compute. Readers of weights
gather nothing: for them, sharding by rows is part of the layout (`converters.layouts.rows`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeGuard, cast

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed import torch_fully_sharded_data_parallel as wrapper
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from converters.layouts.rows import rows_of
from megatron_ext import compat, transformer_engine_compat


class FullySharded(TorchFullyShardedDataParallel):
    """megatron-core's wrapper; 0.16 calls its `finish_grad_sync` with an argument that it does not accept."""

    def finish_grad_sync(self, **_options: Any) -> None:
        """Do nothing: each layer's gradients are reduced in the backward pass."""


def wrap_fully_sharded(chunk: torch.nn.Module, fields: Mapping[str, Any]) -> FullySharded:
    """Shard the parameters of `chunk`; `fields` are those of DistributedDataParallelConfig."""
    compat.shard_on_this_device(wrapper)
    transformer_engine_compat.leave_out_empty_tensors()
    config = DistributedDataParallelConfig(**{**fields, "use_distributed_optimizer": False})
    # By default, megatron-core also wraps RotaryEmbedding and, with Transformer Engine's modules, the output layer,
    # which is sharded with the rest here.
    wrapped = FullySharded(chunk.config, config, chunk, sub_modules_to_wrap={TransformerLayer, LanguageModelEmbedding})
    for module in _sharded_modules(chunk):
        # The loss weights include the denominator of the global batch, so gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # The loss reads the output layer, and an embedding tied to it, after the model's forward pass.
    read_later = [chunk, chunk.embedding] if chunk.share_embeddings_and_output_weights else [chunk]
    for kept in read_later:
        cast(FSDPModule, kept).set_reshard_after_forward(False, recurse=False)
    return wrapped


def free_gathered(chunks: Sequence[torch.nn.Module]) -> None:
    """Free the rows of other ranks that a forward pass without a backward pass leaves gathered."""
    for chunk in chunks:
        for module in _sharded_modules(chunk):
            module.reshard()


def own_rows(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, its gradient or its state; a tensor that is not sharded is returned as it is."""
    return tensor.to_local().detach() if is_cut(tensor) else tensor


def is_cut(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is sharded, so that this rank has only some of its rows."""
    return isinstance(tensor, DTensor)


def first_element(tensor: Tensor) -> int:
    """Index, in the whole tensor, of the first element that this rank has."""
    if not is_cut(tensor):
        return 0
    (rank,) = tensor.device_mesh.get_coordinate() or ()
    return rows_of(tensor.shape[0], rank, tensor.device_mesh.size()).start * prod(tensor.shape[1:])


@contextmanager
def outlined(chunk: torch.nn.Module) -> Iterator[None]:
    """Within the context, sharded parameters of `chunk` are replaced by whole ones without values."""
    modules = list(chunk.modules())
    cut = [
        (vars(each)["_parameters"], name, own)
        for each in modules
        for name, own in each._parameters.items()
        if own is not None and is_cut(own)
    ]
    for parameters, name, own in cut:
        whole = torch.nn.Parameter(torch.empty(own.shape, dtype=own.dtype, device="meta"), own.requires_grad)
        vars(whole).update(vars(own))
        parameters[name] = whole
    try:
        yield
    finally:
        for parameters, name, own in cut:
            parameters[name] = own


def all_finite(chunks: Sequence[torch.nn.Module]) -> bool:
    """Collective: whether all gradients of all ranks are finite."""
    bad = torch.zeros((), device=own_rows(next(chunks[0].parameters())).device)
    for gradient in gradients(chunks):
        bad += (~gradient.isfinite()).sum()
    torch.distributed.all_reduce(bad)
    return not bad


def gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """This rank's rows of all existing gradients."""
    for chunk in chunks:
        yield from (own_rows(each.grad) for each in chunk.parameters() if each.grad is not None)


def _sharded_modules(chunk: torch.nn.Module) -> Iterator[FSDPModule]:
    yield from (module for module in chunk.modules() if isinstance(module, FSDPModule))
