import pytest
import torch

from converters.errors import UserError
from megarl.algorithms.finite import check_finite
from megarl.algorithms.ragged import Ragged

NAN, INFINITY = float("nan"), float("inf")


def called(index: int) -> str:
    return f"sample {index}"


@pytest.mark.parametrize("values", [[], [0.0, -1.0], [3e38, 3e38, 3e38]])
def test_numbers_pass_even_if_their_sum_is_none(values: list[float]) -> None:
    check_finite("value", torch.tensor(values), called)


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_the_first_bad_value_of_a_response_is_named(bad: float) -> None:
    with pytest.raises(UserError, match=f"^the reward of sample 1 is {bad}, not a finite number"):
        check_finite("reward", torch.tensor([0.0, bad, NAN]), called)


def test_infinities_that_cancel_out_are_found() -> None:
    with pytest.raises(UserError, match="sample 0 is inf"):
        check_finite("reward", torch.tensor([INFINITY, -INFINITY]), called)


@pytest.mark.parametrize(
    ("place", "where"), [(0, "token 0 of sample 1"), (2, "token 2 of sample 1"), (3, "token 0 of sample 3")]
)
def test_the_first_bad_value_of_a_token_is_named_by_response_and_position(place: int, where: str) -> None:
    values = torch.zeros(4)
    values[place:] = NAN
    with pytest.raises(UserError, match=f"the log-prob of {where} is nan"):
        check_finite("log-prob", values, called, Ragged(torch.tensor([0, 3, 0, 1, 0])))
