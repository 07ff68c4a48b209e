import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.algorithms import recurrence
from megarl.algorithms.ragged import Ragged
from megarl.algorithms.recurrence import prefix_sums, suffix_sums

LENGTHS = st.lists(
    st.one_of(st.integers(0, 5), st.sampled_from([15, 16, 17, 32, 47, 300, 1100])), min_size=1, max_size=8
)


def in_loops(values: list[float], decay: float) -> list[float]:
    total, result = 0.0, []
    for value in values:
        total = value + decay * total
        result.append(total)
    return result


@settings(max_examples=60)
@given(LENGTHS, st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(0, 1000))
@example([32, 16, 16, 1], 0.9, 0)
@example([0, 0, 2100], 1.0, 0)
@example([5, 256, 256, 2000], 0.999, 0)
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


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 1000))
def test_values_that_are_made_in_pieces_give_the_same_sums(lengths: list[int], piece: int, seed: int) -> None:
    responses = Ragged(torch.tensor(lengths))
    tokens = torch.randn(responses.tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for function in (prefix_sums, suffix_sums):
        whole = function(tokens, responses, 0.9)
        asked: list[int] = []

        def give(part: slice, asked: list[int] = asked) -> torch.Tensor:
            assert part.stop - part.start <= piece * 16
            asked.extend(range(part.start, part.stop))
            return tokens[part].clone()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recurrence, "_PIECE", piece)
            torch.testing.assert_close(function(give, responses, 0.9), whole, rtol=1e-14, atol=1e-14)
        assert asked == list(range(responses.tokens))


def test_more_tokens_than_a_piece() -> None:
    lengths = [400_000, 1, 300_000]
    actual = suffix_sums(torch.ones(sum(lengths)), Ragged(torch.tensor(lengths)))
    assert torch.equal(actual, torch.cat([torch.arange(length, 0, -1) for length in lengths]).float())
