"""Values between processes: whatever the stretches of a sequence are, they arrive as they were."""

import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megarl.data.packed_stretches import packed, unpacked
from megarl.data.stretches import RunLengthArray, StoredArray, Stretch, Values, fetch_concatenated, not_finite

FLOATS = st.floats(width=32, allow_nan=True)
PLAIN = st.lists(FLOATS, max_size=5).map(np.float32)
RUNS = st.lists(st.tuples(FLOATS, st.integers(0, 4)), max_size=4).map(
    lambda runs: RunLengthArray(np.float32([value for value, _ in runs]), np.int32([length for _, length in runs]))
)
LONG = st.integers(0, 3).map(lambda seed: np.arange(seed, seed + 30_000, dtype=np.float32))
STORED = st.integers(0, 9).map(
    lambda number: StoredArray(f"00ff{number % 4}", "<f4", 5000 + number, is_finite=number > 0, start=1000 * number)
)
SEQUENCES = st.lists(st.lists(st.one_of(PLAIN, RUNS, LONG, STORED), max_size=4).map(tuple), max_size=6)
SEVERAL: list[Values] = [
    (RunLengthArray(np.float32([0, 1]), np.int32([2, 3])), np.float32([0.5, 0.25])),
    (
        StoredArray("00ff", "<f4", 5000, is_finite=True),
        RunLengthArray(np.float32([-1]), np.int32([4])),
        np.float32([2]),
    ),
]


def bits(stretch: Stretch) -> object:
    if isinstance(stretch, StoredArray):
        return stretch
    return [
        each.tobytes()
        for each in ([stretch.values, stretch.lengths] if isinstance(stretch, RunLengthArray) else [stretch])
    ]


@given(SEQUENCES)
@example(SEVERAL)
def test_any_stretches_arrive_as_they_were(sequences: list[Values]) -> None:
    arrived = unpacked(pickle.loads(pickle.dumps(packed(sequences))))
    assert [[type(each) for each in values] for values in arrived] == [[type(each) for each in v] for v in sequences]
    assert [list(map(bits, values)) for values in arrived] == [list(map(bits, values)) for values in sequences]


@given(SEQUENCES)
def test_what_is_not_a_number_is_found_wherever_it_is(sequences: list[Values]) -> None:
    def is_finite(stretch: Stretch) -> bool:
        if isinstance(stretch, StoredArray):
            return stretch.is_finite
        return bool(np.isfinite(stretch.values if isinstance(stretch, RunLengthArray) else stretch).all())

    expected = [number for number, values in enumerate(sequences) if not all(map(is_finite, values))]
    assert not_finite(sequences) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
def test_thousands_of_short_sequences_are_a_few_arrays_of_their_type(dtype: type[np.generic]) -> None:
    values = [
        (np.arange(20).astype(dtype), RunLengthArray(np.ones(1, dtype=dtype), np.int32([5]))) for _ in range(1000)
    ]
    sent = pickle.dumps(packed(values), protocol=5)
    assert len(sent) < 1000 * (20 * np.dtype(dtype).itemsize + 40)
    assert fetch_concatenated(unpacked(pickle.loads(sent))).dtype == dtype
    assert fetch_concatenated(unpacked(pickle.loads(sent))).tobytes() == fetch_concatenated(values).tobytes()


@given(st.lists(st.one_of(PLAIN, RUNS), min_size=1).map(lambda stretches: [tuple(stretches)]))
def test_runs_are_opened_in_their_places(sequences: list[Values]) -> None:
    one_by_one = [
        np.repeat(each.values, each.lengths) if isinstance(each, RunLengthArray) else each
        for values in sequences
        for each in values
    ]
    assert fetch_concatenated(sequences).tobytes() == np.concatenate(one_by_one).tobytes()
