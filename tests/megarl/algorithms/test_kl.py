import math

import pytest
import reference_values as verl
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.kl import KL_ESTIMATORS, k2, k3


@pytest.mark.parametrize(
    ("name", "value", "gradient"), [("k2", verl.K2, verl.K2_GRADIENT), ("k3", verl.K3, verl.K3_GRADIENT)]
)
def test_the_values_and_gradients_of_verl(name: str, value: torch.Tensor, gradient: torch.Tensor) -> None:
    log_probs = verl.LOG_PROBS.clone().requires_grad_()
    estimate = KL_ESTIMATORS[name](log_probs, verl.REFERENCE_LOG_PROBS)
    estimate.sum().backward()
    torch.testing.assert_close(estimate.detach(), value, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-5, atol=2e-6)


@given(st.floats(-10, 0), st.floats(-10, 0))
def test_the_formulas(log_prob, reference) -> None:
    difference = reference - log_prob
    policy, other = torch.tensor([log_prob]).double(), torch.tensor([reference]).double()
    torch.testing.assert_close(k2(policy, other).item(), difference**2 / 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k3(policy, other).item(), math.exp(difference) - 1 - difference, rtol=1e-5, atol=1e-5)


def test_k3_keeps_its_digits_where_the_policies_nearly_agree() -> None:
    difference = torch.tensor([1e-3, -1e-3])
    torch.testing.assert_close(k3(torch.zeros(2), difference), 0.5 * difference.square(), rtol=1e-3, atol=0)


def test_k3_of_policies_far_apart_is_finite() -> None:
    log_probs = torch.tensor([-300.0, 0.0], requires_grad=True)
    estimate = k3(log_probs, torch.tensor([0.0, -300.0]))
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert estimate[1] == 299
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


def test_the_mean_of_k3_is_the_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = torch.log_softmax(torch.randn(2, 7, generator=generator).double(), dim=-1)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close((log_p.exp() * k3(log_p, log_q)).sum(), exact)
