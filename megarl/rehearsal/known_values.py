"""Fake tensors of integers that keep their values, and routing of tokens evenly to all experts.

A model computes sizes from integers: the bounds of sequences, the number of tokens per expert. Without their values the
sizes that depend on them would be unknown.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from megarl.rehearsal.operands import tensors_of, written_by

_aten = torch.ops.aten
_c10d = torch.ops.c10d
_LARGEST = 2**22
"""Maximum number of elements of a tensor whose values are kept: a table of tokens and experts is smaller."""
_CONSTANTS: Mapping[Any, float] = {
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}
_WITHOUT_VALUES = (
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default),
    *(_aten.rand.default, _aten.randn.default),
)

_LIFTED = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
"""Operators that turn a program's constant into an ordinary tensor."""


class KnownValues(TorchDispatchMode):
    """Within the context, tensors computed only from constants have values; enter it within a FakeTensorMode.

    Tokens choose experts in round-robin order, and a collective returns this rank's data in place of other ranks'.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COLLECTIVES:
            result = func(*args, **kwargs)
            self._receive(*_COLLECTIVES[func](args))
            return result
        if func is _aten.topk.default and self._of(args[0]) is None:
            return self._choose(func, args, kwargs)
        if func in _CONSTANTS:
            return self._constant(func(*args, **kwargs), _CONSTANTS[func])
        tensors = list(tensors_of((args, kwargs)))
        if tensors and func not in _LIFTED and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            # The state of a random number generator is real even here.
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        values = [self._of(tensor) for tensor in tensors]
        if func in _WITHOUT_VALUES or any(value is None for value in values):
            return self._without_values(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _of(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, FakeTensor):
            # A constant that is about to become an ordinary tensor.
            return tensor
        found = self._values.get(id(tensor))
        return found[1] if found else None

    def _know(self, tensor: Tensor, value: Tensor) -> Tensor:
        key = id(tensor)
        self._values[key] = weakref.ref(tensor, lambda _: self._values.pop(key, None)), value
        return tensor

    def _constant(self, tensor: Tensor, value: float) -> Tensor:
        if tensor.numel() > _LARGEST:
            return tensor
        with unset_fake_temporarily():
            return self._know(tensor, torch.full(tensor.shape, value, dtype=tensor.dtype))

    def _choose(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Choose top-k without values: the places that follow those of the row before."""
        largest, places = func(*args, **kwargs)
        width, count = args[0].shape[-1], places.shape[-1]
        with unset_fake_temporarily():
            value = (torch.arange(places.numel()) % width).view(places.shape)
        return largest, self._know(places, value) if count else places

    def _without_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute shapes only. A mask with known values still determines how many elements are selected."""
        if func is _aten.masked_select.default and (mask := self._of(args[1])) is not None:
            return args[0].new_empty(_count(mask, args[0].shape))
        if func is _aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in self._places(index)])
        for written in written_by(func, args, kwargs):
            self._values.pop(id(written), None)
        return func(*args, **kwargs)

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """Convert an index of a tensor; a mask becomes the selected indices in each of its dimensions."""
        if index is None or index.dtype != torch.bool or (mask := self._of(index)) is None:
            return [index]
        count = _count(mask, mask.shape)
        return [torch.empty(count, dtype=torch.long, device=index.device) for _ in range(mask.dim())]

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute shapes, then values, which determine some shapes."""
        if func is _aten._local_scalar_dense.default:
            return self._compute_values(func, args, kwargs)
        try:
            found = func(*args, **kwargs)
        except DynamicOutputShapeException:
            real = self._compute_values(func, args, kwargs)
            first = next(tensors_of((args, kwargs)))
            found = tree_map(lambda each: first.new_empty(each.shape, dtype=each.dtype), real)
        else:
            if any(each.numel() > _LARGEST for each in tensors_of(found)):
                return found
            real = self._compute_values(func, args, kwargs)
        for fake, value in zip(tensors_of(found), tensors_of(real), strict=True):
            self._know(fake, value)
        return found

    def _compute_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        real_args, real_kwargs = tree_map(self._real, (args, kwargs))
        with unset_fake_temporarily():
            return func(*real_args, **real_kwargs)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._of(value)
        # Values are always on the host.
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _receive(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Make `outputs` copies of the concatenated `inputs`, repeated as often as there is room."""
        values = [self._of(each) for each in inputs]
        for output in outputs:
            self._values.pop(id(output), None)
        if any(value is None for value in values):
            return
        with unset_fake_temporarily():
            flat = torch.cat([value.reshape(-1) for value in values if value is not None])
            for output in outputs:
                repeats = -(-output.numel() // max(1, flat.numel()))
                self._know(output, flat.repeat(repeats)[: output.numel()].view(output.shape))


_Sides = tuple[Sequence[Tensor], Sequence[Tensor]]
_COLLECTIVES: Mapping[Any, Callable[[Sequence[Any]], _Sides]] = {
    _c10d.allreduce_.default: lambda args: (args[0], args[0]),
    _c10d.broadcast_.default: lambda args: (args[0], args[0]),
    _c10d._allgather_base_.default: lambda args: ([args[0]], [args[1]]),
    _c10d.allgather_.default: lambda args: (args[0][0], args[1]),
    _c10d._reduce_scatter_base_.default: lambda args: ([args[0]], [args[1]]),
    _c10d.alltoall_base_.default: lambda args: ([args[0]], [args[1]]),
}
"""Collective -> what it writes, and what this rank contributes."""


def _count(mask: Tensor, shape: Sequence[int]) -> int:
    """Number of elements that a mask selects from a tensor of a shape."""
    with unset_fake_temporarily():
        return int(mask.expand(shape).sum())
