"""Long arrays of a result, taken out of it: they stay where they are until somebody reads them."""

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megarl.data.stretches import Array, Stored, is_long


def taken_out(result: Any) -> tuple[bytes, list[Array]]:
    """A result without its long arrays, for `put_back`, and these."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(result)
    return file.getvalue(), pickler.arrays


def put_back(pickled: bytes, references: Sequence[Any]) -> Any:
    """The result, with a `Stored` in the place of each array that was taken out."""
    unpickler = _Unpickler(io.BytesIO(pickled))
    unpickler.references = references
    return unpickler.load()


class _Place(NamedTuple):
    """Which of the arrays was taken out, and what is known of it."""

    number: int
    dtype: str
    length: int
    is_finite: bool


class _Pickler(pickle.Pickler):
    """Collects `arrays`; one that occurs twice is taken out once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.arrays: list[Array] = []
        self._places: dict[int, _Place] = {}

    def persistent_id(self, value: Any) -> _Place | None:
        """Place of a long array of one dimension; None leaves a value where it is."""
        if not isinstance(value, np.ndarray) or value.ndim != 1 or not is_long(value):
            return None
        if id(value) not in self._places:
            finite = bool(np.isfinite(value).all())
            self._places[id(value)] = _Place(len(self.arrays), value.dtype.str, len(value), finite)
            self.arrays.append(value)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    references: Sequence[Any]

    def persistent_load(self, place: _Place) -> Stored:
        """See `_Pickler.persistent_id`."""
        return Stored(self.references[place.number], place.dtype, place.length, place.is_finite)
