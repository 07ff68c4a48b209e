"""Per-token values as stretches: arrays, runs of equal values, or references into Ray's object store."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from megarl.process.errors import RunFailed

Array: TypeAlias = npt.NDArray[Any]
# Smaller arrays are cheaper to send inline than to look up, and Ray (2.60) sends such results inline itself.
_STORED_BYTES = 100 * 1024
# Smaller arrays are cheaper to pickle as bytes than as out-of-band buffers.
_COPIED_BYTES = 8 * 1024
# Short arrays that are checked together: a copy of them has at most 25 MiB.
_AT_ONCE = 256
# To compare values by their bits: NaN equals itself, and 0 differs from -0.
_BITS = {1: np.uint8, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class RunLengthArray:
    """Run-length-encoded values: each of `values` is repeated `lengths` (int32) times. The example is 0, 0, .5, .5, .5.

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
        # A tenth of the bytes of two pickled arrays; a batch has several of these per sequence.
        return _runs, (self.values.dtype.char, self.values.tobytes(), self.lengths.tobytes())


def _runs(dtype: str, values: bytes, lengths: bytes) -> RunLengthArray:
    return RunLengthArray(np.frombuffer(values, dtype), np.frombuffer(lengths, np.int32))


@dataclass(frozen=True)
class StoredArray:
    """A slice of an array in Ray's object store, with what is known of it without fetching.

    Example: StoredArray("ObjectRef(00ff...)", "<f4", 5000, is_finite=True, start=12_000)
    """

    reference: Any
    """A ray.ObjectRef; typed as Any, so that this module needs Ray only if something is stored."""
    dtype: str
    length: int
    is_finite: bool
    start: int = 0
    """Index of the first value in the array."""

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
    """There is no room for values, neither in the object store nor on the disk that it spills to."""

    happened = "the object store of this machine is full, and so is the disk of TMPDIR, where it goes on"
    sentence = (
        f"{happened}: raise cluster.object_store_bytes (or ray start --object-store-memory), or give TMPDIR a disk that"
        " is less than 95 % full; the same command then continues from the last checkpoint"
    )

    def __init__(self, details: str) -> None:
        self.details = details
        super().__init__(details)


def put(value: Any) -> Any:
    """Put a value into the object store and return its reference. Raises StoreFull."""
    import ray
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise StoreFull(str(error)) from error


def put_sequences(values: Array, lengths: Array) -> list[Values]:
    """Split values [T] by sequence; a long array is put into the object store once, a short one stays in the process.

    All sequences share one reference, since Ray (2.60) takes 0.1 to 0.6 ms for each. Equal values at the beginning of a
    sequence, as over its prompt, become a run.
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
    """Length of the run of bitwise equal values at the beginning; 0 for a run of one."""
    bits = values.view(_BITS[values.itemsize])
    if len(bits) < 2 or bits[0] != bits[1]:
        return 0
    differs = bits != bits[0]
    return int(differs.argmax()) if differs.any() else len(values)


def stored(values: Array) -> Array | StoredArray:
    """Put a long array into the object store; return a short one as it is."""
    if not is_long(values):
        return values
    return StoredArray(put(values), values.dtype.str, len(values), holds_numbers(values))


def holds_numbers(values: Array) -> bool:
    """Whether all values are finite, which integers always are."""
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def is_long(values: Stretch) -> bool:
    """Whether an array of this process is large enough for the object store."""
    return isinstance(values, np.ndarray) and values.nbytes >= _STORED_BYTES


def is_remote(values: Values) -> bool:
    """Whether any values are in the object store, so that `fetch` has to get them."""
    return any(isinstance(each, StoredArray) for each in values)


def is_copied(values: Array | memoryview) -> bool:
    """Whether an array is so short that its receiver gets a copy instead of a view of the sent buffer."""
    return values.nbytes < _COPIED_BYTES


def fetch(values: Stretch) -> Array:
    """Return a stretch as one array of this process. Raises ValuesGone."""
    return values if isinstance(values, np.ndarray) else fetch_concatenated([(values,)])


def fetch_all(values: Sequence[Array | StoredArray]) -> list[Array]:
    """Return stretches as arrays of this process, fetching all stored ones in one call. Raises ValuesGone."""
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
    """Return the values of each sequence as arrays, end to end; expands runs and copies nothing else."""
    arrays = iter(_arrays(sequences))
    return [list(islice(arrays, len(values))) for values in sequences]


def fetch_concatenated(sequences: Iterable[Values]) -> Array:
    """Return the values of several sequences in one array. Raises ValuesGone."""
    return np.concatenate(_arrays(sequences))


def _arrays(sequences: Iterable[Values]) -> list[Array]:
    """Fetch the stretches of all sequences, with runs expanded."""
    stretches = [stretch for values in sequences for stretch in values]
    expanded = _expanded([each for each in stretches if isinstance(each, RunLengthArray)])
    return fetch_all([next(expanded) if isinstance(each, RunLengthArray) else each for each in stretches])


def run_length_encoded(values: Array) -> Array | RunLengthArray:
    """Run-length-encode `values` [T] if that takes fewer bytes; otherwise return them as they are."""
    bits = values.view(_BITS[values.itemsize])
    changes = bits[1:] != bits[:-1]
    run_bytes = values.itemsize + np.dtype(np.int32).itemsize
    if (np.count_nonzero(changes) + 1) * run_bytes >= values.nbytes:
        return values
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    return RunLengthArray(values[starts], np.diff(starts, append=len(values)).astype(np.int32))


def constant(value: Any, length: int) -> RunLengthArray:
    """Repeat a value, of a numpy type, `length` times."""
    return RunLengthArray(np.array([value]), np.array([length], dtype=np.int32))


def no_values_like(sequences: Sequence[Values]) -> Values:
    """Empty values with the dtype of these sequences."""
    first = next(stretch for values in sequences for stretch in values)
    return (np.empty(0, first.dtype),)


@overload
def distinct(stretch: Array | RunLengthArray) -> Array: ...


@overload
def distinct(stretch: Stretch) -> Array | StoredArray: ...


def distinct(stretch: Stretch) -> Array | StoredArray:
    """The values with each run given once, for results that do not depend on how often a value repeats."""
    return stretch.values if isinstance(stretch, RunLengthArray) else stretch


def not_finite(sequences: Sequence[Values]) -> list[int]:
    """Indices of the sequences that hold a NaN or an infinity, found without fetching from the object store."""
    # All together first: there are thousands, and hardly ever one that is not finite.
    known = [distinct(each) for values in sequences for each in values]
    if _are_finite(known):
        return []
    return [number for number, values in enumerate(sequences) if not is_finite(values)]


def is_finite(values: Values) -> bool:
    """Whether all values are finite, determined without fetching from the object store."""
    return _are_finite([distinct(each) for each in values])


def _are_finite(stretches: Sequence[Array | StoredArray]) -> bool:
    arrays = [each for each in stretches if not isinstance(each, StoredArray)]
    some = (arrays[start : start + _AT_ONCE] for start in range(0, len(arrays), _AT_ONCE))
    return all(each.is_finite for each in stretches if isinstance(each, StoredArray)) and all(
        np.isfinite(np.concatenate(part)).all() for part in some
    )


def _expanded(runs: Sequence[RunLengthArray]) -> Iterator[Array]:
    """Expand runs, all in one operation: there are thousands of a few tokens each."""
    if not runs:
        return
    lengths = np.concatenate([each.lengths for each in runs])
    values = np.repeat(np.concatenate([each.values for each in runs]), lengths)
    sums = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
    last_runs = np.cumsum([len(each.values) for each in runs], dtype=np.int64)
    for start, end in pairwise([0, *sums[last_runs].tolist()]):
        yield values[start:end]
