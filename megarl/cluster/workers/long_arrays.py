"""Transfers arrays of a result: long ones stay where they are until they are read, and few others are copied."""

import io
import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megarl.data.stretches import Array, StoredArray, holds_numbers, is_copied, is_long

_ALIGNMENT = 8
"""Alignment of arrays in bytes, so that their elements can be read in place."""


class Rest(NamedTuple):
    """A result without its long arrays."""

    pickled: bytes
    values: Array
    """uint8, its other arrays except the shortest, concatenated: Ray (2.60) takes 40 us per array."""
    ends: list[int]
    """The end of each array in `values`; the next begins at the next multiple of 8."""


def taken_out(result: Any) -> tuple[Rest, list[Array]]:
    """Return a result without its long arrays, for `put_back`, and the long arrays."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(result)
    return Rest(file.getvalue(), np.frombuffer(pickler.values, np.uint8), pickler.ends), pickler.arrays


def put_back(rest: Rest, references: Sequence[Any]) -> Any:
    """Rebuild the result, with a `StoredArray` per array that was taken out; the others share memory with `rest`."""
    buffers = [rest.values[-(-start // _ALIGNMENT) * _ALIGNMENT : end] for start, end in pairwise([0, *rest.ends])]
    unpickler = _Unpickler(io.BytesIO(rest.pickled), buffers=buffers)
    unpickler.references = references
    return unpickler.load()


class _Place(NamedTuple):
    """Placeholder for an array that was taken out: its number and properties."""

    number: int
    dtype: str
    length: int
    is_finite: bool


class _Pickler(pickle.Pickler):
    """Collects long `arrays`, each only once even if it occurs twice, and the `values` of others."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._is_copied)
        self.arrays: list[Array] = []
        self.values = bytearray()
        self.ends: list[int] = []
        self._places: dict[int, _Place] = {}

    def persistent_id(self, value: Any) -> _Place | None:
        """Return the placeholder of a long one-dimensional array; None leaves a value in place."""
        if not isinstance(value, np.ndarray) or value.ndim != 1 or not is_long(value):
            return None
        if id(value) not in self._places:
            place = _Place(len(self.arrays), value.dtype.str, len(value), holds_numbers(value))
            self._places[id(value)] = place
            self.arrays.append(value)
        return self._places[id(value)]

    def _is_copied(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether an array's bytes are pickled in band; those of others are collected."""
        raw = buffer.raw()
        if is_copied(raw):
            return True
        self.values += bytes(-len(self.values) % _ALIGNMENT)
        self.values += raw
        self.ends.append(len(self.values))
        return False


class _Unpickler(pickle.Unpickler):
    references: Sequence[Any]

    def persistent_load(self, place: _Place) -> StoredArray:
        """See `_Pickler.persistent_id`."""
        return StoredArray(self.references[place.number], place.dtype, place.length, place.is_finite)
