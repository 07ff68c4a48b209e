"""Per-token values as stretches: arrays, runs of equal values, or references into Ray's object store."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from megarl.process.errors import RunFailed

Array: TypeAlias = npt.NDArray[Any]
# Below this an array is cheaper to send along than to look up, and Ray (2.60) sends a result to its caller itself.
_STORED_BYTES = 100 * 1024
# Below this an array is cheaper to read as bytes than to find in other memory.
_COPIED_BYTES = 8 * 1024
# Short arrays that are looked at together: a copy of them has at most 25 MB.
_AT_ONCE = 256
# To compare values by their bits: not a number is equal to itself, and 0 is not -0.
_BITS = {1: np.uint8, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class RunLengthArray:
    """Values that repeat: each of `values` follows `lengths` times, int32. The example is 0, 0, 0.5, 0.5, 0.5.

    Example: RunLengthArray(np.array([0.0, 0.5]), np.array([2, 3]))
    """

    values: Array
    lengths: Array

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values."""
        return self.values.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        # A tenth of the bytes of two arrays, of which a batch has several for each sequence.
        return _runs, (self.values.dtype.char, self.values.tobytes(), self.lengths.tobytes())


def _runs(dtype: str, values: bytes, lengths: bytes) -> RunLengthArray:
    return RunLengthArray(np.frombuffer(values, dtype), np.frombuffer(lengths, np.int32))


@dataclass(frozen=True)
class StoredArray:
    """Values in an array of Ray's object store, on the machine where it was made, and what is known without a look.

    Example: StoredArray("ObjectRef(00ff...)", "<f4", 5000, is_finite=True, start=12_000)
    """

    reference: Any
    """A ray.ObjectRef: this module does not need Ray where nothing is stored."""
    dtype: str
    length: int
    is_finite: bool
    start: int = 0
    """Where in the array they begin."""

    def __len__(self) -> int:
        return self.length


Stretch: TypeAlias = Array | RunLengthArray | StoredArray
Values: TypeAlias = tuple[Stretch, ...]
"""Stretches of one sequence, end to end."""


class ValuesGone(RunFailed):
    """Values are no longer in the object store: they end with the process that stored them."""

    happened = "an engine or a rank has ended, and values of this step with it"
    sentence = f"{happened}: the end of its own log says why; the same command continues from the last checkpoint"

    def __init__(self, details: str) -> None:
        self.details = details
        super().__init__(details)


class StoreFull(RunFailed):
    """There is no room for values, neither in the object store nor on the disk where it goes on."""

    happened = "the object store of this machine is full, and so is the disk of TMPDIR, where it goes on"
    sentence = (
        f"{happened}: raise cluster.object_store_bytes (or ray start --object-store-memory), or give TMPDIR a disk that"
        " is less than 95 % full; the same command then continues from the last checkpoint"
    )

    def __init__(self, details: str) -> None:
        self.details = details
        super().__init__(details)


def put(value: Any) -> Any:
    """A reference to a value that is now in the object store. Raises StoreFull."""
    import ray
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise StoreFull(str(error)) from error


def put_sequences(values: Array, lengths: Array) -> list[Values]:
    """Values [T] by sequence: one array in the object store holds all, or they stay here where they are few.

    Ray (2.60) takes 0.1 to 0.6 ms for each reference, so thousands of sequences have one. Equal values at the beginning
    of a sequence, as those of a prompt are, are said once.
    """
    starts = lengths.cumsum() - lengths
    if not is_long(values):
        return [(each,) for each in np.split(values, starts[1:])]
    reference, dtype = put(values), values.dtype.str
    if holds_numbers(values):
        finite = np.ones(len(lengths), dtype=bool)
    else:
        finite = np.logical_and.reduceat(np.isfinite(values), starts)
    kept = []
    for each, start, is_finite in zip(np.split(values, starts[1:]), starts.tolist(), finite.tolist(), strict=True):
        equal = _equal_at_the_beginning(each)
        said_once = (constant(each[0], equal),) if equal else ()
        left = len(each) - equal
        kept.append((*said_once, StoredArray(reference, dtype, left, is_finite, start + equal)) if left else said_once)
    return kept


def _equal_at_the_beginning(values: Array) -> int:
    """How many values are the first one, to the bit, before any other is; 0 if that is the only one."""
    bits = values.view(_BITS[values.itemsize])
    if len(bits) < 2 or bits[0] != bits[1]:
        return 0
    differs = bits != bits[0]
    return int(differs.argmax()) if differs.any() else len(values)


def stored(values: Array) -> Array | StoredArray:
    """A long array of this process, now in the object store; a short one is what it was."""
    if not is_long(values):
        return values
    return StoredArray(put(values), values.dtype.str, len(values), holds_numbers(values))


def holds_numbers(values: Array) -> bool:
    """Whether none of the values is infinite or not a number; only one of floating point can be."""
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def is_long(values: Stretch) -> bool:
    """Whether an array of this process belongs into the object store."""
    return isinstance(values, np.ndarray) and values.nbytes >= _STORED_BYTES


def is_remote(values: Values) -> bool:
    """Whether some are in the object store, and `fetch` would have to get them."""
    return any(isinstance(each, StoredArray) for each in values)


def is_copied(values: Array | memoryview) -> bool:
    """Whether an array is so short that who receives it has a copy, and not a view of what was sent."""
    return values.nbytes < _COPIED_BYTES


def fetch(values: Stretch) -> Array:
    """The values as one array of this process. Raises ValuesGone."""
    return values if isinstance(values, np.ndarray) else fetch_concatenated([(values,)])


def fetch_all(values: Sequence[Array | StoredArray]) -> list[Array]:
    """The values as arrays of this process: all that are stored come in one call. Raises ValuesGone."""
    away = list(dict.fromkeys(each.reference for each in values if isinstance(each, StoredArray)))
    if not away:
        return [each for each in values if not isinstance(each, StoredArray)]
    import ray

    try:
        arrays = dict(zip(away, ray.get(away), strict=True))
    except ray.exceptions.ObjectLostError as error:
        raise ValuesGone(str(error)) from error
    return [
        arrays[each.reference][each.start : each.start + each.length] if isinstance(each, StoredArray) else each
        for each in values
    ]


def fetch_each(sequences: Sequence[Values]) -> list[list[Array]]:
    """The values of each sequence in arrays that lie end to end: nothing is copied, only runs are written out."""
    arrays = iter(_arrays(sequences))
    return [list(islice(arrays, len(values))) for values in sequences]


def fetch_concatenated(sequences: Iterable[Values]) -> Array:
    """Values of several sequences in one array."""
    return np.concatenate(_arrays(sequences))


def _arrays(sequences: Iterable[Values]) -> list[Array]:
    """The stretches of all sequences, fetched and written out."""
    stretches = [stretch for values in sequences for stretch in values]
    expanded = _expanded([each for each in stretches if isinstance(each, RunLengthArray)])
    return fetch_all([next(expanded) if isinstance(each, RunLengthArray) else each for each in stretches])


def run_length_encoded(values: Array) -> Array | RunLengthArray:
    """The runs of equal `values` [T] where they are shorter than the values themselves."""
    bits = values.view(_BITS[values.itemsize])
    changes = bits[1:] != bits[:-1]
    run_bytes = values.itemsize + np.dtype(np.int32).itemsize
    if (np.count_nonzero(changes) + 1) * run_bytes >= values.nbytes:
        return values
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    return RunLengthArray(values[starts], np.diff(starts, append=len(values)).astype(np.int32))


def constant(value: Any, length: int) -> RunLengthArray:
    """The same value `length` times; it is of a numpy type."""
    return RunLengthArray(np.array([value]), np.array([length], dtype=np.int32))


def no_values_like(sequences: Sequence[Values]) -> Values:
    """No values, of the type of these."""
    first = next(stretch for values in sequences for stretch in values)
    return (np.empty(0, first.dtype),)


@overload
def distinct(stretch: Array | RunLengthArray) -> Array: ...


@overload
def distinct(stretch: Stretch) -> Array | StoredArray: ...


def distinct(stretch: Stretch) -> Array | StoredArray:
    """The values, those of a run once: for what does not depend on how often a value follows."""
    return stretch.values if isinstance(stretch, RunLengthArray) else stretch


def not_finite(sequences: Sequence[Values]) -> list[int]:
    """The sequences that hold what is not a number, as far as can be told without a look into the object store."""
    # All together first: there are thousands, and hardly ever one.
    known = [distinct(each) for values in sequences for each in values]
    if _are_finite(known):
        return []
    return [number for number, values in enumerate(sequences) if not is_finite(values)]


def is_finite(values: Values) -> bool:
    """Whether all are numbers, as far as can be told without a look into the object store."""
    return _are_finite([distinct(each) for each in values])


def _are_finite(stretches: Sequence[Array | StoredArray]) -> bool:
    arrays = [each for each in stretches if not isinstance(each, StoredArray)]
    some = (arrays[start : start + _AT_ONCE] for start in range(0, len(arrays), _AT_ONCE))
    return all(each.is_finite for each in stretches if isinstance(each, StoredArray)) and all(
        np.isfinite(np.concatenate(part)).all() for part in some
    )


def _expanded(runs: Sequence[RunLengthArray]) -> Iterator[Array]:
    """The values of each, all made at once: thousands are of a few tokens."""
    if not runs:
        return
    lengths = np.concatenate([each.lengths for each in runs])
    values = np.repeat(np.concatenate([each.values for each in runs]), lengths)
    sums = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
    last_runs = np.cumsum([len(each.values) for each in runs], dtype=np.int64)
    for start, end in pairwise([0, *sums[last_runs].tolist()]):
        yield values[start:end]
