import pytest
import torch

from converters.errors import UserError
from megarl.algorithms.aggregation import token_mean


def test_every_token_of_the_batch_weighs_the_same() -> None:
    assert token_mean(torch.tensor([3, 0, 1])).tolist() == [0.25] * 4


def test_no_token_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="no response"):
        token_mean(torch.tensor([0, 0]))
