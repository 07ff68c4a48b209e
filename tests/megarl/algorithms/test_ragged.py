"""Numbers on their own and with a gradient go different ways: both must arrive at the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.ragged import Ragged

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def values(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


@given(LENGTHS, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_the_sum_and_the_mean_of_every_response(lengths: list[int], dtype: torch.dtype, gradient: bool) -> None:
    ragged = Ragged(torch.tensor(lengths))
    tokens = values(sum(lengths)).to(dtype).requires_grad_(gradient)
    expected = torch.stack([piece.double().sum() for piece in tokens.split(lengths)])
    tolerance = {"rtol": 1e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(ragged.sum(tokens).double(), expected, **tolerance)
    means = expected / torch.tensor(lengths).clamp(min=1)
    torch.testing.assert_close(ragged.mean(tokens).double(), means, **tolerance)
    assert ragged.sum(tokens).dtype == dtype
    assert ragged.sum(tokens).requires_grad == gradient


@given(LENGTHS, st.booleans())
def test_what_a_response_has_reaches_all_its_tokens(lengths: list[int], gradient: bool) -> None:
    ragged = Ragged(torch.tensor(lengths))
    of_responses = values(len(lengths)).requires_grad_(gradient)
    spread = ragged.spread(of_responses)
    assert spread.tolist() == [v for v, n in zip(of_responses.tolist(), lengths, strict=True) for _ in range(n)]
    if gradient:
        spread.sum().backward()
        assert of_responses.grad is not None
        assert of_responses.grad.tolist() == [float(n) for n in lengths]


@given(LENGTHS, st.data())
def test_what_a_response_has_reaches_a_part_of_the_tokens(lengths: list[int], data: st.DataObject) -> None:
    ragged, of_responses = Ragged(torch.tensor(lengths)), values(len(lengths))
    start = data.draw(st.integers(0, ragged.tokens))
    part = slice(start, data.draw(st.integers(start, ragged.tokens)))
    assert torch.equal(ragged.spread_part(of_responses, part), ragged.spread(of_responses)[part])


@given(LENGTHS)
def test_what_a_response_has_is_added_part_by_part(lengths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.algorithms.ragged._PART", 3)
        ragged, of_responses, tokens = Ragged(torch.tensor(lengths)), values(len(lengths)), values(sum(lengths))
        expected = tokens + ragged.spread(of_responses)
        assert ragged.add_(tokens, of_responses) is tokens
        assert torch.equal(tokens, expected)


@given(LENGTHS)
def test_values_at_last_tokens(lengths: list[int]) -> None:
    ragged = Ragged(torch.tensor(lengths))
    of_responses = values(len(lengths))
    expected = [v if t == n - 1 else 0.0 for v, n in zip(of_responses.tolist(), lengths, strict=True) for t in range(n)]
    assert ragged.at_last_token(of_responses).tolist() == expected
    assert ragged.last_tokens.tolist() == [end - 1 for end, n in zip(ragged.ends.tolist(), lengths, strict=True) if n]


@given(LENGTHS, st.data())
def test_values_at_the_last_tokens_of_a_part(lengths: list[int], data: st.DataObject) -> None:
    ragged, of_responses = Ragged(torch.tensor(lengths)), values(len(lengths))
    start = data.draw(st.integers(0, ragged.tokens))
    end = data.draw(st.integers(start, ragged.tokens))
    part = values(end - start)
    expected = part + ragged.at_last_token(of_responses)[start:end]
    assert ragged.add_at_last_token_(part, of_responses, start) is part
    assert torch.equal(part, expected)


def test_a_sum_of_thousands_of_tokens_keeps_its_digits() -> None:
    tokens = torch.full((100_000,), 0.1)
    assert abs(float(Ragged(torch.tensor([100_000])).sum(tokens)) / (0.1 * 100_000) - 1) < 1e-6
