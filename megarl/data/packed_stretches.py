"""Values of sequences on their way between processes: thousands of short stretches travel as a few arrays."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megarl.data.stretches import Array, Runs, Stored, Stretch, Values, is_long

_PLAIN, _RUNS, _OTHER = range(3)


class Packed(NamedTuple):
    """Values of N sequences in S stretches, as `packed` makes it.

    Example: Packed(counts=[2], kinds=[1, 0], ends=[1, 3], values=[0.5, 1.0, 2.0], run_lengths=[4], others=[]), which is
    one sequence, (Runs([0.5], [4]), [1.0, 2.0])
    """

    counts: Array
    """int32[N]: how many stretches a sequence has."""
    kinds: Array
    """uint8[S]: whether a stretch is in `values` (0), is in it with each value said once (1), or in `others` (2)."""
    ends: Array
    """int64: where in `values` each of the stretches ends that are there."""
    values: Array
    run_lengths: Array
    """int32: of all `Runs`, in their order."""
    others: list[Array | Stored]
    """Long arrays, which are not copied, and references."""


def packed(sequences: Sequence[Values]) -> Packed:
    """Values of one type, by sequence, in few objects."""
    kinds: list[int] = []
    plain_or_runs: list[Array] = []
    run_lengths: list[Array] = []
    others: list[Array | Stored] = []
    for stretch in chain.from_iterable(sequences):
        if isinstance(stretch, Runs):
            kinds.append(_RUNS)
            plain_or_runs.append(stretch.values)
            run_lengths.append(stretch.lengths)
        elif isinstance(stretch, Stored) or is_long(stretch):
            kinds.append(_OTHER)
            others.append(stretch)
        else:
            kinds.append(_PLAIN)
            plain_or_runs.append(stretch)
    return Packed(
        counts=np.array([len(values) for values in sequences], dtype=np.int32),
        kinds=np.array(kinds, dtype=np.uint8),
        ends=np.cumsum([len(values) for values in plain_or_runs], dtype=np.int64),
        values=_joined(plain_or_runs, np.float32),
        run_lengths=_joined(run_lengths, np.int32),
        others=others,
    )


def unpacked(values: Packed) -> list[Values]:
    """The inverse of `packed`, to the bit; stretches share memory."""
    stretches = _stretches(values)
    return [tuple(islice(stretches, count)) for count in values.counts.tolist()]


def _stretches(packed_values: Packed) -> Iterator[Stretch]:
    _, kinds, ends, values, run_lengths, others = packed_values
    next_end, next_other, start, first_run = iter(ends.tolist()), iter(others), 0, 0
    for kind in kinds.tolist():
        if kind == _OTHER:
            yield next(next_other)
            continue
        end = next(next_end)
        own = values[start:end]
        start = end
        if kind == _PLAIN:
            yield own
            continue
        yield Runs(own, run_lengths[first_run : first_run + len(own)])
        first_run += len(own)


def _joined(arrays: Sequence[Array], dtype: npt.DTypeLike) -> Array:
    """All in one, which has the `dtype` if there are none."""
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
