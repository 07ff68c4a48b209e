import math

import pytest
import torch
import verl_losses as verl
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.kl import KL_ESTIMATORS, k2, k3

OF_VERL = ("k1", "k2", "k3", "abs", "k1+", "k3+")


@pytest.mark.parametrize("case_name", verl.NAMES)
@pytest.mark.parametrize("name", OF_VERL)
def test_the_values_and_gradients_of_verl(name: str, case_name: str) -> None:
    case = verl.case(case_name)
    log_probs = case.arrays["in/log_prob"].clone().requires_grad_()
    estimate = KL_ESTIMATORS[name](log_probs, case.arrays["in/ref_log_prob"])
    estimate.sum().backward()
    # verl's k3 subtracts exp(d) - 1 in float32, which costs it digits that expm1 keeps.
    tolerance = {"relative": 2e-6} if name.startswith("k3") else {}
    verl.assert_equal(estimate, case.arrays[f"kl/{name}/value"], **tolerance)
    verl.assert_equal(log_probs.grad, case.arrays[f"kl/{name}/gradient"], **tolerance)


@pytest.mark.parametrize("name", OF_VERL)
def test_where_we_leave_verl_k3_is_not_cut_at_10(name: str) -> None:
    case = verl.case(verl.FAR)
    log_probs = case.arrays["in/log_prob"].clone().requires_grad_()
    estimate = KL_ESTIMATORS[name](log_probs, case.arrays["in/ref_log_prob"])
    estimate.sum().backward()
    assert log_probs.grad is not None
    cut = (estimate > 10) if name.startswith("k3") else torch.zeros_like(estimate, dtype=torch.bool)
    assert bool(cut.any()) == name.startswith("k3")
    verl.assert_equal(estimate.masked_fill(cut, 10), case.arrays[f"kl/{name}/value"])
    gradient = log_probs.grad.masked_fill(cut, 0) if name == "k3" else log_probs.grad
    verl.assert_equal(gradient, case.arrays[f"kl/{name}/gradient"])


@pytest.mark.parametrize("case_name", verl.NAMES)
def test_rewards_less_the_kl_are_those_of_verl(case_name: str) -> None:
    case = verl.case(case_name)
    kl = KL_ESTIMATORS["k1"](case.arrays["in/old_log_prob"], case.arrays["in/ref_log_prob"])
    verl.assert_equal(case.arrays["in/token_level_rewards"] - 0.05 * kl, case.arrays["rewards_less_kl"])


FORMULAS = {
    "k1": lambda d: -d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
    "abs": abs,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "k2": lambda d: -d,
    "k3": lambda d: 1 - math.exp(d),
    "abs": lambda d: -math.copysign(1, d) if d else 0.0,
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@given(st.floats(-10, 0), st.floats(-10, 0))
def test_the_formulas(name: str, log_prob: float, reference: float) -> None:
    policy = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    estimate = KL_ESTIMATORS[name](policy, torch.tensor([reference], dtype=torch.float64))
    estimate.sum().backward()
    assert policy.grad is not None
    difference = reference - log_prob
    slope = SLOPES["k2" if name.endswith("+") else name](difference)
    assert estimate.item() == pytest.approx(FORMULAS[name.removesuffix("+")](difference), rel=1e-6, abs=1e-9)
    assert policy.grad.item() == pytest.approx(slope, rel=1e-6, abs=1e-9)


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


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_the_mean_of_the_unbiased_ones_is_the_kl(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = torch.log_softmax(torch.randn(2, 7, generator=generator).double(), dim=-1)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close((log_p.exp() * KL_ESTIMATORS[name](log_p, log_q)).sum(), exact)


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+", "abs+"])
def test_on_policy_the_mean_gradient_of_the_straight_through_forms_is_that_of_the_kl(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 7, generator=generator).double()
    logits.requires_grad_()
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(other, -1)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    sampled = (log_p.detach().exp() * KL_ESTIMATORS[name](log_p, log_q)).sum()
    (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    torch.testing.assert_close(gradient, expected)
    (useless,) = torch.autograd.grad((log_p.detach().exp() * KL_ESTIMATORS["k1"](log_p, log_q)).sum(), logits)
    torch.testing.assert_close(useless, torch.zeros_like(useless), rtol=0, atol=1e-12)


def test_k2_reads_its_arguments_in_either_order() -> None:
    assert k2(torch.tensor([1.0]), torch.tensor([3.0])) == k2(torch.tensor([3.0]), torch.tensor([1.0])) == 2
