import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.algorithms.aggregation import AGGREGATIONS

some_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def one_by_one(name: str, lengths: list[int], constant: int) -> list[float]:
    responses = sum(1 for length in lengths if length)
    weight = {
        "token_mean": lambda length: 1 / sum(lengths),
        "token_sum": lambda length: 1.0,
        "seq_mean_token_sum": lambda length: 1 / responses,
        "seq_mean_token_mean": lambda length: 1 / responses / length,
        "seq_mean_token_sum_norm": lambda length: 1 / responses / constant,
    }[name]
    return [weight(length) for length in lengths for _ in range(length)]


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(some_lengths, st.integers(1, 50))
def test_the_weight_of_every_token(name: str, lengths: list[int], constant: int) -> None:
    weights = AGGREGATIONS[name](torch.tensor(lengths), aggregation_tokens=constant)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(one_by_one(name, lengths, constant), rel=1e-6)


@pytest.mark.parametrize("name", ["token_mean", "seq_mean_token_mean"])
def test_the_weights_of_means_sum_to_one_for_thousands_of_responses(name: str) -> None:
    lengths = torch.randint(0, 300, (4000,), generator=torch.Generator().manual_seed(0))
    weights = AGGREGATIONS[name](lengths)
    assert float(weights.double().sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_no_token_at_all_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no response of this step has a token"):
        AGGREGATIONS[name](torch.tensor([0, 0]), aggregation_tokens=4)


@pytest.mark.parametrize("constant", [None, 0, -3])
def test_the_constant_length_has_to_be_given(constant: int | None) -> None:
    with pytest.raises(UserError, match=r"aggregation_tokens is (None|0|-3): set it to at least 1"):
        AGGREGATIONS["seq_mean_token_sum_norm"](torch.tensor([2]), aggregation_tokens=constant)
