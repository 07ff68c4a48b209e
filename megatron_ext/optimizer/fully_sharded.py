"""Weights, gradients and optimizer state cut over data-parallel ranks by torch's FSDP2, in megatron-core's wrapper.

A rank has some rows of every parameter; layers gather theirs one after the other as they compute. Readers of weights
gather nothing: to them the rows are one more cut of the layout (`converters.layouts.rows`).
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
    """megatron-core's wrapper, which 0.16 calls with an argument that it does not take."""

    def finish_grad_sync(self, **_options: Any) -> None:
        """Nothing is left to do: each layer's gradients are reduced in the backward pass."""


def wrap_fully_sharded(chunk: torch.nn.Module, fields: Mapping[str, Any]) -> FullySharded:
    """Cut the parameters of `chunk`, which are the whole ones until then; `fields` are of its configuration."""
    compat.shard_on_this_device(wrapper)
    transformer_engine_compat.leave_out_empty_tensors()
    config = DistributedDataParallelConfig(**{**fields, "use_distributed_optimizer": False})
    # By default RotaryEmbedding, too, and beside modules of Transformer Engine the output layer, which is cut with all.
    wrapped = FullySharded(chunk.config, config, chunk, sub_modules_to_wrap={TransformerLayer, LanguageModelEmbedding})
    for module in _sharded_modules(chunk):
        # The weights of the loss hold the denominator of the global batch: gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # The output layer, and the embedding tied to it, are read by the loss, after the forward pass of the model.
    read_later = [chunk, chunk.embedding] if chunk.share_embeddings_and_output_weights else [chunk]
    for kept in read_later:
        cast(FSDPModule, kept).set_reshard_after_forward(False, recurse=False)
    return wrapped


def free_gathered(chunks: Sequence[torch.nn.Module]) -> None:
    """Have each rank of `chunks` that are cut with its own rows alone, as after a forward pass without a backward."""
    for chunk in chunks:
        for module in _sharded_modules(chunk):
            module.reshard()


def own_rows(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, of its gradient or its state; a tensor that is not cut is itself."""
    return tensor.to_local().detach() if is_cut(tensor) else tensor


def is_cut(tensor: object) -> TypeGuard[DTensor]:
    """Whether this rank has only rows of `tensor`."""
    return isinstance(tensor, DTensor)


def first_element(tensor: Tensor) -> int:
    """Number, in the whole tensor, of the first element that this rank has."""
    if not is_cut(tensor):
        return 0
    (rank,) = tensor.device_mesh.get_coordinate() or ()
    return rows_of(tensor.shape[0], rank, tensor.device_mesh.size()).start * prod(tensor.shape[1:])


@contextmanager
def outlined(chunk: torch.nn.Module) -> Iterator[None]:
    """Inside, the parameters of `chunk` that are cut are whole ones without values."""
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
    """Collective: whether the gradients of all ranks are numbers."""
    bad = torch.zeros((), device=own_rows(next(chunks[0].parameters())).device)
    for gradient in gradients(chunks):
        bad += (~gradient.isfinite()).sum()
    torch.distributed.all_reduce(bad)
    return not bad


def gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """This rank's rows of the gradients that there are."""
    for chunk in chunks:
        yield from (own_rows(each.grad) for each in chunk.parameters() if each.grad is not None)


def _sharded_modules(chunk: torch.nn.Module) -> Iterator[FSDPModule]:
    yield from (module for module in chunk.modules() if isinstance(module, FSDPModule))
