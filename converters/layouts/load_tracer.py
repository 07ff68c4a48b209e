"""Follows the elements of HuggingFace tensors through code that loads them, without any values.

The code gets tensors on torch's meta device, which have a storage but no memory. A view shares its tensor's storage, so
its offset and strides tell its place in the HuggingFace tensor. Copies of such views into parameters are recorded and
not carried out; other writes into parameters are not carried out either. If a loader joins several tensors before it
copies them, each is followed as a part of the result.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from converters.boxes import Box
from converters.layouts.strided import Strided

_aten = torch.ops.aten
_EQUAL = (_aten.clone.default, _aten._to_copy.default)
"""Operators that return a new tensor with the same values."""
_OTHER_BITS = (_aten.view.dtype, _aten.view_as_real.default, _aten.view_as_complex.default)
"""Operators that return views with other elements than their tensor."""
_NO_BOX = "takes a part of it that is not a box"
_CONSTANTS: Mapping[Any, Callable[[Sequence[Any]], float]] = {
    _aten.fill_.Scalar: lambda arguments: arguments[1],
    _aten.zero_.default: lambda _: 0.0,
}


class UntraceableError(Exception):
    """The loading code does something with a HuggingFace tensor that no placement expresses; the reason is recorded."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of `hf_box` of a HuggingFace tensor into `box` of a parameter."""

    hf_name: str
    hf_box: Box
    box: Box


@dataclass(frozen=True, slots=True)
class _Followed:
    """A meta tensor with the elements of `hf_box`, perhaps squeezed; kept alive so that its storage is not reused."""

    hf_name: str
    hf_box: Box
    tensor: Tensor

    def hf_box_of(self, view: Tensor) -> Box | None:
        """The box of the HuggingFace tensor that corresponds to a view of `tensor`; None if it is not a box."""
        inner = Strided.of(self.tensor).box_of(Strided.of(view))
        if inner is None:
            return None
        lengths = list(zip(inner.start, inner.stop, self.tensor.shape, strict=True))
        intervals = iter((start, stop) for start, stop, length in lengths if length > 1)
        parts = [next(intervals) if length > 1 else (0, 1) for length in self.hf_box.shape]
        return Box(tuple(start for start, _ in parts), tuple(stop for _, stop in parts)).shift(self.hf_box.start)


@dataclass(frozen=True, slots=True)
class _Joined:
    """A meta tensor of parts concatenated along a dimension; kept alive so that its storage is not reused."""

    parts: Sequence[tuple[_Followed, Tensor]]
    """Each followed tensor, with the view of it that is the part."""
    dimension: int
    tensor: Tensor

    def cut(self, view: Tensor) -> list[tuple[_Followed, Tensor, int]] | None:
        """The parts in a view of `tensor`, and where each begins in the view; None if the view is not a box of it."""
        box = Strided.of(self.tensor).box_of(Strided.of(view))
        if box is None or box.shape != tuple(view.shape):
            return None
        found, end = [], 0
        for followed, part in self.parts:
            start, end = end, end + part.shape[self.dimension]
            bounds = list(zip(box.start, box.stop, strict=True))
            low, high = bounds[self.dimension]
            bounds[self.dimension] = (max(low, start) - start, min(high, end) - start)
            if max(low, start) < min(high, end):
                within = tuple(slice(*each) for each in bounds)
                found.append((followed, part[within], max(low, start) - low))
        return found


class LoadTracer(TorchDispatchMode):
    """While active, records copies from followed tensors into `parameters`, to which nothing is written.

    `excluded` maps parameters whose elements cannot be traced to the reason.
    """

    def __init__(self, parameters: Mapping[str, Tensor], excluded: Mapping[str, str]) -> None:
        super().__init__()
        self.copies: dict[str, list[Copy]] = defaultdict(list)
        """Parameter -> the copies into it."""
        self.padding: dict[str, list[tuple[Box, float]]] = defaultdict(list)
        """Parameter -> the boxes that are filled with a constant, and the constant."""
        self.untraced: dict[str, str] = {}
        """HuggingFace name -> why the recorded copies of it are not complete."""
        self.changed: dict[str, str] = {}
        """Parameter -> what else writes into it."""
        self._excluded = excluded
        self._parameters: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, parameter in parameters.items():
            self._parameters[_storage(parameter)].append((name, parameter))
        self._followed: dict[int, _Followed] = {}
        self._joined: dict[int, _Joined] = {}
        self._boxes: dict[Box, Box] = {}

    def follow(self, hf_name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor [*shape] without values that stands for a HuggingFace tensor."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._followed[_storage(tensor)] = _Followed(hf_name, Box.whole(tensor.shape), tensor)
        return tensor

    def origin(self, tensor: Tensor) -> tuple[str, Box]:
        """The followed tensor that `tensor`, copied or not, is a part of, and the box of that part.

        Raises UntraceableError if it is not a box of one.
        """
        followed = self._followed.get(_storage(tensor))
        box = followed.hf_box_of(tensor) if followed else None
        if followed is None or box is None:
            raise UntraceableError(f"a tensor of shape {list(tensor.shape)}")
        return followed.hf_name, box

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        storages = [_storage(tensor) for tensor in _tensors((*args, *kwargs.values()))]
        joined = next((self._joined[each] for each in storages if each in self._joined), None)
        if joined is not None:
            return self._use_joined(joined, func, args, kwargs)
        followed = next((self._followed[each] for each in storages if each in self._followed), None)
        if followed is not None:
            return self._use(followed, func, args, kwargs)
        if parameters := [each for each in _written(func, args, kwargs) if self._holders(each)]:
            self._write(func, args, parameters)
            return parameters[0] if func._schema.returns else None
        return func(*args, **kwargs)

    def _use(self, followed: _Followed, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten.copy_.default and _storage(args[0]) not in self._followed:
            self._copy(followed, args[0], args[1])
            return args[0]
        if func is _aten.cat.default:
            return self._join(*args, **kwargs)
        if func not in _EQUAL:
            if not _is_view(func):
                raise self._untraceable([followed], f"computes with its values ({func})")
            return func(*args, **kwargs)
        result = _without_values(func, args, kwargs)
        if fault := _cast_fault(args[0].dtype, result.dtype, widening=True):
            raise self._untraceable([followed], fault)
        hf_box = followed.hf_box_of(args[0]) if result.numel() else followed.hf_box
        if hf_box is None:
            raise self._untraceable([followed], _NO_BOX)
        if result.numel() and _long(hf_box.shape) != _long(result.shape):
            raise self._untraceable([followed], "copies a part of it into another shape")
        self._followed[_storage(result)] = _Followed(followed.hf_name, hf_box, result)
        return result

    def _join(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        parts = [(self._followed.get(_storage(tensor)), tensor) for tensor in tensors]
        known = [(followed, tensor) for followed, tensor in parts if followed is not None]
        whole = [followed for followed, _ in known]
        result = torch.cat([torch.empty_like(tensor, device="meta") for tensor in tensors], dim)
        if len(known) < len(parts):
            raise self._untraceable(whole, "joins it with what is not loaded")
        for _, tensor in known:
            if fault := _cast_fault(tensor.dtype, result.dtype, widening=True):
                raise self._untraceable(whole, fault)
        self._joined[_storage(result)] = _Joined(known, dim % result.dim(), result)
        return result

    def _use_joined(self, joined: _Joined, func: Any, args: Any, kwargs: Any) -> Any:
        copies = func is _aten.copy_.default and _storage(args[0]) not in self._joined
        if not copies and func not in _EQUAL:
            if not _is_view(func):
                whole = self._origins(_tensors((*args, *kwargs.values())))
                raise self._untraceable(whole, f"joins it with others, and computes with their values ({func})")
            return func(*args, **kwargs)
        whole = [followed for followed, _ in joined.parts]
        cut = joined.cut(args[1] if copies else args[0])
        if cut is None:
            raise self._untraceable(whole, "joins it with others, and takes a part of them that is not a box")
        if copies:
            self._copy_joined(joined, cut, args[0], args[1])
            return args[0]
        result = _without_values(func, args, kwargs)
        if fault := _cast_fault(args[0].dtype, result.dtype, widening=True):
            raise self._untraceable(whole, fault)
        parts = [(followed, part) for followed, part, _ in cut]
        self._joined[_storage(result)] = _Joined(parts, joined.dimension, result)
        return result

    def _copy_joined(
        self, joined: _Joined, cut: Sequence[tuple[_Followed, Tensor, int]], destination: Tensor, source: Tensor
    ) -> None:
        whole = [followed for followed, _ in joined.parts]
        if destination.shape != source.shape:
            raise self._untraceable(whole, "joins it with others, and copies them into another shape")
        for followed, part, start in cut:
            self._copy(followed, destination.narrow(joined.dimension, start, part.shape[joined.dimension]), part)
        # They are loaded together: if one of them needs the engine's loader, so do the others.
        if reasons := [self.untraced[each.hf_name] for each in whole if each.hf_name in self.untraced]:
            for each in whole:
                self.untraced.setdefault(each.hf_name, reasons[0])

    def _copy(self, followed: _Followed, destination: Tensor, source: Tensor) -> None:
        """Record a copy, or why it cannot be expressed; the loader continues either way."""
        if not destination.numel():
            return
        if not self._holders(destination):
            # The loader would continue with memory that was never filled.
            raise self._untraceable([followed], "puts it into memory that is not one of the model's parameters")
        hf_box, (name, box) = followed.hf_box_of(source), self._place(destination)
        if fault := _cast_fault(source.dtype, destination.dtype, widening=False):
            self._note([followed], fault)
        elif hf_box is None:
            self._note([followed], _NO_BOX)
        elif box is None:
            self._note([followed], f"scatters it over {name}")
        elif name in self._excluded:
            self._note([followed], f"puts it into {name}, and {self._excluded[name]}")
        else:
            self._take_padding(name, box)
            hf_box, box = (self._boxes.setdefault(each, each) for each in (hf_box, box))
            self.copies[name].append(Copy(followed.hf_name, hf_box, box))

    def _write(self, func: Any, args: Sequence[Any], written: Sequence[Tensor]) -> None:
        """Record a write that has no elements of HuggingFace tensors."""
        for tensor in written:
            if not tensor.numel():
                continue
            name, box = self._place(tensor)
            if func not in _CONSTANTS or box is None:
                self.changed[name] = f"changes {name} after it was filled ({func})"
                continue
            if any(copy.box.intersect(box) for copy in self.copies[name]):
                self.changed[name] = f"overwrites {name} with a constant after it was filled"
            self._take_padding(name, box)
            self.padding[name].append((box, _CONSTANTS[func](args)))

    def _take_padding(self, name: str, box: Box) -> None:
        """Remove `box` from the padding of a parameter."""
        if name in self.padding:
            self.padding[name] = [
                (rest, value) for padding, value in self.padding[name] for rest in padding.without(box)
            ]

    def _holders(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return self._parameters.get(_storage(tensor), [])

    def _place(self, tensor: Tensor) -> tuple[str, Box | None]:
        """The parameter in whose memory `tensor` lies, and its box there; the box is None if it is not one."""
        view = Strided.of(tensor)
        holders = self._holders(tensor)
        boxes = (
            (name, Strided.of(parameter).box_of(view)) for name, parameter in holders if parameter.dtype == tensor.dtype
        )
        return next(((name, box) for name, box in boxes if box), (holders[0][0], None))

    def _origins(self, tensors: Iterable[Tensor]) -> list[_Followed]:
        """All followed tensors among `tensors`, including the parts of joined ones."""
        found: list[_Followed] = []
        for storage in map(_storage, tensors):
            if storage in self._followed:
                found.append(self._followed[storage])
            elif storage in self._joined:
                found.extend(followed for followed, _ in self._joined[storage].parts)
        return found

    def _note(self, whole: Iterable[_Followed], action: str) -> None:
        for each in whole:
            self.untraced.setdefault(each.hf_name, f"the engine's loader {action}")

    def _untraceable(self, whole: Sequence[_Followed], action: str) -> UntraceableError:
        self._note(whole, action)
        return UntraceableError([each.hf_name for each in whole])


def _cast_fault(source: torch.dtype, target: torch.dtype, *, widening: bool) -> str | None:
    """Why a cast does more than a plain copy's rounding, or (if `widening`) loses precision; None if neither."""
    if source == target:
        return None
    plain = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (source, target))
    if plain and not (widening and torch.promote_types(source, target) != target):
        return None
    return f"casts it from {source} to {target}"


def _without_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that copies tensors without values, on the meta device whatever device it asks for."""
    return func(*args, **(kwargs | {"device": "meta"} if "device" in kwargs else kwargs))


def _long(shape: Sequence[int]) -> list[int]:
    return [length for length in shape if length > 1]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operator, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among its arguments that `func` writes to."""
    if func._schema.is_mutable:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _tensors([args[i] if i < len(args) else kwargs.get(argument.name)])


def _is_view(func: Any) -> bool:
    if func is _aten._unsafe_view.default:
        # It returns a view although its schema does not say so.
        return True
    if func in _OTHER_BITS:
        return False
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
