import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.algorithms.ragged import Ragged
from megarl.algorithms.recurrence import prefix_sums, suffix_sums

LENGTHS = st.lists(
    st.one_of(st.integers(0, 5), st.sampled_from([31, 32, 33, 64, 95, 300, 1100])), min_size=1, max_size=8
)


def in_loops(values: list[float], decay: float) -> list[float]:
    total, result = 0.0, []
    for value in values:
        total = value + decay * total
        result.append(total)
    return result


@settings(max_examples=60)
@given(LENGTHS, st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(0, 1000))
@example([64, 32, 32, 1], 0.9, 0)
@example([0, 0, 2100], 1.0, 0)
@example([5, 1024, 1024, 2000], 0.999, 0)
def test_the_sums_of_every_response_know_nothing_of_the_others(lengths: list[int], decay: float, seed: int) -> None:
    tokens = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    pieces = [piece.tolist() for piece in tokens.double().split(lengths)]
    forward = [value for piece in pieces for value in in_loops(piece, decay)]
    backward = [value for piece in pieces for value in in_loops(piece[::-1], decay)[::-1]]
    for function, expected in ((prefix_sums, forward), (suffix_sums, backward)):
        exact = torch.tensor(expected, dtype=torch.float64)
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            actual = function(tokens.to(dtype), Ragged(torch.tensor(lengths)), decay)
            assert actual.dtype == dtype
            scale = max([1.0, *map(abs, expected)])
            torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("function", [prefix_sums, suffix_sums])
def test_the_values_themselves_stay(function) -> None:
    values = torch.ones(100)
    function(values, Ragged(torch.tensor([40, 60])), 0.5)
    assert values.tolist() == [1.0] * 100
