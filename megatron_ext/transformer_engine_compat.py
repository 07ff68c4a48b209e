"""Workarounds for Transformer Engine 2.11, one function each. Every one has a test that fails without it.

They are called where they are needed. Its fields and modules that megatron-core handles wrongly are in `compat`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext import device


def leave_out_empty_tensors() -> None:
    """Give kernels for lists of tensors none without elements, as ranks past the last row of a parameter have.

    A launch takes as many tensors as fit, and is started within the loop over the parts of a tensor. An empty one at
    the end starts none: what is still to be launched is left out. One that takes a launch's last place lets the next
    ones be written behind its tables. Steps, norms and clipping would be wrong, with nothing said, up to 2.17
    (Transformer Engine's issues 3207 and 3202); from 2.18 on it leaves such tensors out itself.
    """
    if not device.has_transformer_engine():
        return
    from transformer_engine.pytorch.optimizers import MultiTensorApply

    if hasattr(MultiTensorApply.__call__, "original"):
        return
    original = MultiTensorApply.__call__

    def call(self: Any, kernel: Any, skip: Tensor, lists: Sequence[Sequence[Tensor]], *arguments: Any) -> Any:
        return original(self, kernel, skip, _without_empty(lists), *arguments)

    call.original = original  # type: ignore[attr-defined]
    MultiTensorApply.__call__ = call


def _without_empty(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """This rank's rows in lists that belong together, but for places that are empty; one of them if all are.

    A kernel asks the first tensor for its type and device.
    """
    own = [[each.to_local() if isinstance(each, DTensor) else each for each in tensors] for tensors in lists]
    filled = [place for place, tensor in enumerate(own[0]) if tensor.numel()]
    kept = filled or range(len(own[0]))[:1]
    return [[tensors[place] for place in kept] for tensors in own]
