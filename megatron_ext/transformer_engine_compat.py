"""Workarounds for Transformer Engine 2.11, one function each. Each has a test that fails without it.

They are called where they are needed. Workarounds for megatron-core's use of Transformer Engine are in `compat`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext import device


def leave_out_empty_tensors() -> None:
    """Remove empty tensors, as ranks past a parameter's last row have, from the lists given to multi-tensor kernels.

    The kernels collect as many tensors as fit in a launch, and launch inside the loop over a tensor's chunks. An empty
    tensor at the end launches nothing, so the tensors collected so far are skipped; an empty one in a launch's last
    slot lets the next ones be written past its tables. Steps, norms and clipping would be silently wrong, up to 2.17
    (Transformer Engine's issues 3207 and 3202); from 2.18 on, it skips such tensors itself.
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
    """This rank's rows in parallel lists, without the places that are empty; the first place is kept if all are.

    A kernel takes dtype and device from the first tensor.
    """
    own = [[each.to_local() if isinstance(each, DTensor) else each for each in tensors] for tensors in lists]
    filled = [place for place, tensor in enumerate(own[0]) if tensor.numel()]
    kept = filled or range(len(own[0]))[:1]
    return [[tensors[place] for place in kept] for tensors in own]
