"""Values of sequences on their way between processes: thousands of short stretches travel as a few arrays."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.data.stretches import Array, RunLengthArray, StoredArray, Stretch, Values, is_long

_PLAIN, _RUNS, _LONG, _STORED = range(4)


class Packed(NamedTuple):
    """Values of N sequences in S stretches, as `packed` makes it.

    Example: Packed(counts=[2], kinds=[1, 0], ends=[1, 3], values=[0.5, 1.0, 2.0], run_lengths=[4], ...), where nothing
    is long, is one sequence, (RunLengthArray([0.5], [4]), [1.0, 2.0])
    """

    counts: Array
    """int32[N]: how many stretches a sequence has."""
    kinds: Array
    """uint8[S]: whether a stretch is in `values` (0), has runs in it (1), is long (2) or stored (3)."""
    ends: Array
    """int64: the end in `values` of each stretch kept there (kinds 0 and 1)."""
    values: Array
    run_lengths: Array
    """int32: of all runs, in their order."""
    long: list[Array]
    """Long arrays, which are not copied."""
    references: list[Any]
    """Arrays in the object store."""
    dtypes: list[str]
    """The type of each of these."""
    places: Array
    """int64[stored, 4]: of each that is stored its reference's number, length, whether it is finite, and start."""


def packed(sequences: Sequence[Values]) -> Packed:
    """Values of one type, by sequence, in few objects."""
    kinds: list[int] = []
    plain_or_runs: list[Array] = []
    run_lengths: list[Array] = []
    long: list[Array] = []
    references: dict[Any, int] = {}
    dtypes: list[str] = []
    places: list[tuple[int, int, bool, int]] = []
    for stretch in chain.from_iterable(sequences):
        if isinstance(stretch, RunLengthArray):
            kinds.append(_RUNS)
            plain_or_runs.append(stretch.values)
            run_lengths.append(stretch.lengths)
        elif isinstance(stretch, StoredArray):
            kinds.append(_STORED)
            number = references.setdefault(stretch.reference, len(references))
            if number == len(dtypes):
                dtypes.append(stretch.dtype)
            places.append((number, stretch.length, stretch.is_finite, stretch.start))
        elif is_long(stretch):
            kinds.append(_LONG)
            long.append(stretch)
        else:
            kinds.append(_PLAIN)
            plain_or_runs.append(stretch)
    return Packed(
        counts=np.array([len(values) for values in sequences], dtype=np.int32),
        kinds=np.array(kinds, dtype=np.uint8),
        ends=np.cumsum([len(values) for values in plain_or_runs], dtype=np.int64),
        values=_joined(plain_or_runs, np.float32),
        run_lengths=_joined(run_lengths, np.int32),
        long=long,
        references=list(references),
        dtypes=dtypes,
        places=np.array(places, dtype=np.int64).reshape(-1, 4),
    )


def unpacked(values: Packed) -> list[Values]:
    """The inverse of `packed`, to the bit; stretches share memory."""
    stretches = _stretches(values)
    return [tuple(islice(stretches, count)) for count in values.counts.tolist()]


def _stretches(packed_values: Packed) -> Iterator[Stretch]:
    _, kinds, ends, values, run_lengths, long, references, dtypes, places = packed_values
    next_end, next_long, next_place, start, first_run = iter(ends.tolist()), iter(long), iter(places.tolist()), 0, 0
    for kind in kinds.tolist():
        if kind == _LONG:
            yield next(next_long)
            continue
        if kind == _STORED:
            number, length, is_finite, first = next(next_place)
            yield StoredArray(references[number], dtypes[number], length, bool(is_finite), first)
            continue
        end = next(next_end)
        own = values[start:end]
        start = end
        if kind == _PLAIN:
            yield own
            continue
        yield RunLengthArray(own, run_lengths[first_run : first_run + len(own)])
        first_run += len(own)


def _joined(arrays: Sequence[Array], dtype: npt.DTypeLike) -> Array:
    """All in one, which has the `dtype` if there are none."""
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
