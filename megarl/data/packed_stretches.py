"""Serialization of sequences' values between processes: thousands of short stretches travel as a few arrays."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.data.stretches import Array, RunLengthArray, StoredArray, Stretch, Values, is_long

_PLAIN, _RUNS, _LONG, _STORED = range(4)


class Packed(NamedTuple):
    """Values of N sequences in S stretches, the result of `packed`.

    Example: Packed(counts=[2], kinds=[1, 0], ends=[1, 3], values=[0.5, 1.0, 2.0], run_lengths=[4], ...) without long
    arrays is one sequence, (RunLengthArray([0.5], [4]), [1.0, 2.0])
    """

    counts: Array
    """int32[N]: stretches of each sequence."""
    kinds: Array
    """uint8[S]: a plain array in `values` (0), runs with values in `values` (1), a long array (2), or stored (3)."""
    ends: Array
    """int64: end in `values` of each stretch of kind 0 or 1."""
    values: Array
    run_lengths: Array
    """int32: lengths of all runs, in order."""
    long: list[Array]
    """Long arrays, which are not copied."""
    references: list[Any]
    """References to arrays in the object store."""
    dtypes: list[str]
    """The dtype of each of these arrays."""
    places: Array
    """int64[stored, 4]: index in `references`, length, whether it is finite, and start of each stored stretch."""


def packed(sequences: Sequence[Values]) -> Packed:
    """Pack values of one dtype, by sequence, into few objects."""
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
    """Invert `packed`, to the bit; the stretches are views."""
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
    """Concatenate arrays; `dtype` is that of the result without any."""
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
