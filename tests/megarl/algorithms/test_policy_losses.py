import math

import pytest
import reference_values as verl
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.policy_losses import clip

log_prob = st.floats(-6, 0)
token = st.tuples(log_prob, log_prob, st.floats(-3, 3))


def test_the_gradient_of_verl() -> None:
    log_probs = verl.LOG_PROBS.clone().requires_grad_()
    result = clip(log_probs, verl.OLD_LOG_PROBS, verl.ADVANTAGES, clip_low=verl.CLIP_LOW, clip_high=verl.CLIP_HIGH)
    (result.loss.sum() / verl.TOKENS_OF_BATCH).backward()
    torch.testing.assert_close(log_probs.grad, verl.POLICY_LOSS_GRADIENT, rtol=1e-5, atol=1e-8)
    cut_off = (verl.POLICY_LOSS_GRADIENT == 0).float()
    assert torch.equal(result.metrics["policy/clip_fraction"], cut_off)
    assert torch.equal(result.metrics["policy/clip_fraction_high"], cut_off * (verl.ADVANTAGES > 0))
    assert torch.equal(result.metrics["policy/clip_fraction_low"], cut_off * (verl.ADVANTAGES < 0))


@given(st.lists(token, min_size=1, max_size=8), st.floats(0, 0.9), st.floats(0, 2))
def test_the_formula_token_by_token(tokens, clip_low, clip_high) -> None:
    log_probs, old, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    result = clip(log_probs, old, advantages, clip_low=clip_low, clip_high=clip_high)
    for index, (new, before, advantage) in enumerate(tokens):
        ratio = math.exp(new - before)
        bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
        expected = -min(ratio * advantage, bounded * advantage)
        assert result.loss[index].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_policy_far_from_the_old_one_gives_finite_numbers() -> None:
    log_probs = torch.tensor([0.0, -500.0], requires_grad=True)
    result = clip(log_probs, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


def test_a_log_prob_that_is_no_number_shows() -> None:
    result = clip(torch.tensor([float("nan")]), torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2)
    assert result.loss.isnan().all()
