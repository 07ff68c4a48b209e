import pytest
import torch

from megarl.refit.log_prob_check import LogProbMismatchError, largest_mean


@pytest.mark.parametrize("means", [[0.06, 0.01], [0.01, 0.06], [torch.nan, 0.01], [0.01, torch.nan]])
def test_one_response_that_differs_too_much_or_has_no_number_fails(means):
    with pytest.raises(LogProbMismatchError, match=r"differ by (0\.0600|nan) nats"):
        largest_mean([torch.tensor([0.0, 2 * mean]) for mean in means], tolerance=0.05)
    assert largest_mean([torch.tensor([0.04]), torch.tensor([0.01, 0.06])], tolerance=0.05) == pytest.approx(0.04)
