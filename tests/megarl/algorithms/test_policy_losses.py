import itertools
import math
from typing import Any

import pytest
import torch
import verl_losses as verl
from hypothesis import given
from hypothesis import strategies as st
from loop_losses import LOOPS
from torch import Tensor

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.policy_losses.surrogates import binary_kl
from megarl.algorithms.ragged import Ragged

OF_VERL = [name for name in POLICY_LOSSES if name != "sppo"]
# verl averages these so whatever it is told.
FIXED_AGGREGATION = dict.fromkeys(("gspo", "gmpo", "sapo"), "seq_mean_token_mean")
LOW, HIGH = verl.OPTIONS["clip_low"], verl.OPTIONS["clip_high"]


def options_of_verl(name: str) -> dict[str, float | None]:
    # verl has a dual clip in its PPO loss alone.
    return {**verl.OPTIONS, "dual_clip": verl.OPTIONS["dual_clip"] if name == "clip" else None}


def chosen_by_verl(case: verl.Case, name: str) -> Tensor | None:
    """Tokens that verl drew (clip_cov) or took (kl_cov), as its gradient shows."""
    if name not in ("clip_cov", "kl_cov"):
        return None
    gradient = case.arrays[f"policy_loss/{name}/token_mean/is0/gradient"] * case.ragged.tokens
    old, advantages = case.arrays["in/old_log_prob"], case.arrays["in/advantages"]
    ratio = (case.arrays["in/log_prob"] - old).exp()
    if name == "kl_cov":
        return (gradient + advantages * ratio).abs() > 0.25
    return (gradient == 0) & ~(((advantages > 0) & (ratio > 1 + HIGH)) | ((advantages < 0) & (ratio < 1 - LOW)))


def factor_of_verl(case: verl.Case, name: str, suffix: str) -> Tensor:
    """Effect of the importance weights of "is1" on a token's loss; gmpo makes one of those of a response."""
    weights = case.arrays["in/rollout_is_weights"]
    if suffix == "is0":
        return torch.ones_like(weights)
    return case.ragged.spread(case.ragged.mean(weights.log()).exp()) if name == "gmpo" else weights


def weights_of_verl(case: verl.Case, name: str, label: str, ranks: int) -> Tensor:
    """The weights that make our sum verl's loss, of this rank of the step.

    verl's is to be averaged over the ranks, ours to be summed. Its gmpo has the mean over all rows of the micro-batch
    as its loss, those without a token and those of other ranks left out or not.
    """
    lengths = verl.lengths_of_step(case.ragged.lengths) if ranks > 1 and name != "gmpo" else case.ragged.lengths
    aggregation = FIXED_AGGREGATION.get(name, label)
    weights = AGGREGATIONS[aggregation](lengths, options=verl.options_of(aggregation))
    factor = float((lengths > 0).float().mean()) if name == "gmpo" else ranks
    return weights[: case.ragged.tokens] * factor


@pytest.mark.parametrize("name", OF_VERL)
@pytest.mark.parametrize("case_name", verl.EVERY)
def test_values_and_gradients_are_those_of_verl(name: str, case_name: str) -> None:
    case = verl.case(case_name)
    log_probs = case.arrays["in/log_prob"].clone().requires_grad_()
    inputs = case.inputs(log_probs, chosen_by_verl(case, name))
    token_loss = POLICY_LOSSES[name](inputs, options_of_verl(name)).loss
    prefix = f"policy_loss/{name}/"
    left = {key for key in (*case.scalars, *case.arrays) if key.startswith(prefix) and "clipfrac" not in key}
    for label, suffix, ranks in itertools.product(AGGREGATIONS, ("is0", "is1"), (1, verl.RANKS)):
        key = f"{prefix}{label}/{suffix}" + ("/global" if ranks > 1 else "")
        if f"{key}/loss" not in case.scalars:
            continue
        terms = weights_of_verl(case, name, label, ranks) * factor_of_verl(case, name, suffix) * token_loss
        error = abs(float(terms.detach().sum()) - case.scalars[f"{key}/loss"])
        assert error <= 1e-6 * float(terms.detach().abs().sum()), key
        (gradient,) = torch.autograd.grad(terms.sum(), log_probs, retain_graph=True)
        verl.assert_equal(gradient, case.arrays[f"{key}/gradient"])
        left -= {f"{key}/loss", f"{key}/gradient"}
    assert not left - {f"{prefix}ppo_kl"}


def share(case: verl.Case, name: str, metric: str) -> float:
    inputs = case.inputs(case.arrays["in/log_prob"], chosen_by_verl(case, name))
    return float(POLICY_LOSSES[name](inputs, options_of_verl(name)).metrics[metric].mean())


@pytest.mark.parametrize("case_name", verl.EVERY)
def test_clip_fractions_are_those_of_verl(case_name: str) -> None:
    case = verl.case(case_name)
    for name in ("clip", "gspo", "cispo", "dppo_tv", "dppo_kl"):
        expected = case.scalars[f"policy_loss/{name}/pg_clipfrac"]
        assert share(case, name, "policy/clip_fraction") == pytest.approx(expected, rel=1e-6), name
    # verl counts what lies outside the bounds on either side, for gmpo by the sign of the advantage.
    dual = case.scalars["policy_loss/clip/pg_clipfrac_lower"]
    assert share(case, "clip", "policy/clip_fraction_dual") == pytest.approx(dual, abs=1e-7)
    chosen = case.scalars["policy_loss/clip_cov/pg_clipfrac"]
    assert share(case, "clip_cov", "policy/chosen_fraction") == pytest.approx(chosen, rel=1e-6)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_the_far_case_meets_every_bound_of_dppo(name: str) -> None:
    case = verl.case(verl.FAR)
    for metric in ("policy/clip_fraction_high", "policy/clip_fraction_low", "policy/ratio_capped"):
        assert share(case, name, metric) > 0.02, metric


log_probs_of_tokens = st.floats(-6, -1e-3)
token = st.tuples(
    log_probs_of_tokens, log_probs_of_tokens, st.floats(-3, 3), log_probs_of_tokens, st.booleans(), st.floats(0.01, 2)
)
responses = st.lists(st.lists(token, max_size=7), min_size=1, max_size=5).filter(any)
bounds = st.fixed_dictionaries(
    {
        "clip_low": st.floats(0.01, 0.9),
        "clip_high": st.floats(0.01, 2),
        "dual_clip": st.none() | st.floats(1.5, 4),
        "ratio_cap": st.floats(1, 4),
        "temperature_positive": st.floats(0.5, 2),
        "temperature_negative": st.floats(0.5, 2),
        "covariance_kl_coefficient": st.floats(0, 2),
        "eta": st.floats(0.5, 2),
        "beta": st.floats(0.01, 2),
    }
)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(responses, bounds)
def test_value_and_gradient_are_those_of_a_loop_over_the_tokens(name: str, rows, options) -> None:
    table = torch.tensor([t for row in rows for t in row], dtype=torch.float64)
    ragged = Ragged(torch.tensor([len(row) for row in rows]))
    weights = table[:, 5]
    composed, looped = (table[:, 0].clone().requires_grad_() for _ in range(2))
    inputs = {
        "log_probs": composed,
        "old_log_probs": table[:, 1],
        "advantages": table[:, 2],
        "reference_log_probs": table[:, 3],
        "chosen": table[:, 4].bool(),
        "responses": ragged,
    }
    loss = (weights * POLICY_LOSSES[name](inputs, options).loss).sum()
    loss.backward()

    expected, at = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        if row:
            _, old, advantages, reference, chosen, weight = zip(*row, strict=True)
            losses = LOOPS[name](list(looped[at : at + len(row)]), old, advantages, reference, chosen, options)
            expected = expected + sum(w * each for w, each in zip(weight, losses, strict=True))
        at += len(row)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(composed.grad, looped.grad, rtol=1e-9, atol=1e-9)


def one_token(log_prob: float, old: float, advantage: float) -> tuple[dict[str, Any], Tensor]:
    leaf = torch.tensor([log_prob], requires_grad=True)
    return {
        "log_probs": leaf,
        "old_log_probs": torch.tensor([old]),
        "advantages": torch.tensor([advantage]),
        "reference_log_probs": torch.tensor([old]),
        "chosen": torch.tensor([False]),
        "responses": Ragged(torch.tensor([1])),
    }, leaf


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize(("log_prob", "old"), [(0.0, -500.0), (-500.0, 0.0)])
def test_a_policy_far_from_the_old_one_gives_finite_numbers(name: str, log_prob: float, old: float) -> None:
    inputs, leaf = one_token(log_prob, old, -1.0)
    loss = POLICY_LOSSES[name](inputs, {**verl.OPTIONS, "eta": 1.0, "dual_clip": None}).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_log_prob_that_is_no_number_shows(name: str) -> None:
    inputs, _ = one_token(float("nan"), -1.0, 1.0)
    assert POLICY_LOSSES[name](inputs, {**verl.OPTIONS, "eta": 1.0}).loss.isnan().all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_losses_that_clip_upward_stop_an_unlikely_token_that_grew(name: str) -> None:
    inputs, leaf = one_token(-5.0, -6.0, 0.5)
    POLICY_LOSSES[name](inputs, {**verl.OPTIONS, "eta": 1.0, "dual_clip": None}).loss.sum().backward()
    assert bool(leaf.grad == 0) == POLICY_LOSSES[name].clips_upward


@pytest.mark.parametrize(("advantage", "moved"), [(1.0, 0.6), (-1.0, -0.6)])
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_token_that_has_left_the_trust_region_is_not_pushed_further(
    name: str, advantage: float, moved: float
) -> None:
    old = torch.tensor(0.3 if moved > 0 else 0.7)
    present = torch.log(old + moved * 0.6)
    for direction, held in ((advantage, True), (-advantage, False)):
        inputs, leaf = one_token(float(present), float(old.log()), direction)
        result = POLICY_LOSSES[name](inputs, {**verl.OPTIONS, "clip_low": 0.05, "clip_high": 0.05})
        result.loss.sum().backward()
        assert bool(leaf.grad == 0) == held
        assert float(result.metrics["policy/clip_fraction"]) == held


def test_the_bound_of_a_ratio_that_an_advantage_pulls_further_out_is_counted() -> None:
    inputs, _ = one_token(0.0, -1.0, 1.0)
    metrics = POLICY_LOSSES["clip"](inputs, verl.OPTIONS).metrics
    assert float(metrics["policy/clip_fraction_high"]) == 1
    assert float(metrics["policy/clip_fraction_low"]) == 0
    inputs, _ = one_token(-2.0, -1.0, -1.0)
    metrics = POLICY_LOSSES["gmpo"](inputs, verl.OPTIONS).metrics
    assert float(metrics["policy/clip_fraction_low"]) == 1


@given(st.floats(-1, 1), st.floats(-3, -0.1), st.integers(1, 6))
def test_sppo_rests_where_the_response_has_moved_by_its_advantage(advantage: float, reference: float, length) -> None:
    references, advantages = torch.tensor([[reference] * length, [advantage] * length], dtype=torch.float64)
    leaf = (references + 2.0 * advantage / length).requires_grad_()
    inputs = {
        "log_probs": leaf,
        "reference_log_probs": references,
        "advantages": advantages,
        "responses": Ragged(torch.tensor([length])),
    }
    POLICY_LOSSES["sppo"](inputs, {"eta": 2.0}).loss.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.zeros_like(leaf), rtol=0, atol=1e-9)


def test_the_divergence_of_a_certain_token_is_a_number() -> None:
    old = torch.tensor([0.0, -0.1])
    likely = math.exp(-0.1)
    known = -0.1 * likely + (1 - likely) * math.log((1 - likely) / 1e-8)
    assert binary_kl(torch.zeros(2), old).tolist() == pytest.approx([0.0, known], rel=1e-5)
