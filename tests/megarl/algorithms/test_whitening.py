import pytest
import torch
import verl_losses as verl

from megarl.algorithms.advantages.whitening import whiten_, whitened_by_token
from megarl.algorithms.ragged import Ragged


def formula(values: torch.Tensor) -> torch.Tensor:
    exact = values.double()
    return (exact - exact.mean()) / (exact.var() + 1e-8).sqrt()


@pytest.mark.parametrize("offset", [0.0, 3.0, -100.0])
def test_half_a_million_tokens_keep_their_digits(offset: float) -> None:
    # Most are near 0 and few are not, as returns with a discount are: small terms of a large sum.
    values = 0.99 ** torch.arange(500_000).remainder(4000).double()
    values = (values + offset).float()
    torch.testing.assert_close(whiten_(values.clone()).double(), formula(values), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_equal_values_become_exactly_0(count: int) -> None:
    assert whiten_(torch.full((count,), 0.1)).tolist() == [0.0] * count


def test_one_value_per_response_counts_as_often_as_it_has_tokens() -> None:
    responses = Ragged(torch.tensor([3, 0, 1, 70]))
    values = torch.tensor([1.0, 9.0, -2.0, 0.5], dtype=torch.float64)
    whitened = whitened_by_token(values, responses)
    torch.testing.assert_close(responses.spread(whitened), formula(responses.spread(values)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case_name", verl.NAMES)
def test_the_values_of_verl(case_name: str) -> None:
    case = verl.case(case_name)
    verl.assert_equal(whiten_(case.arrays["in/values"].clone()), case.arrays["whitened"])
