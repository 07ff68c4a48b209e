"""Ratios to the rollout, the unbiased KL and the off-policy mask, against loops over float64 and exact sums."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_batches import random_batch, run, sequences
from torch import Tensor

from megarl.algorithms import KL_ESTIMATORS, PolicyObjective
from megarl.algorithms.corrections import off_policy_sequence_mask
from megarl.algorithms.kl import UNBIASED, importance_weighted
from megarl.algorithms.ragged import Ragged
from megarl.schema import AlgorithmConfig, CorrectionConfig
from megatron_ext.packing.packing import RaggedBatch

LIMIT = 0.05


def by_the_formula(batch: RaggedBatch, log_probs: Tensor, config: AlgorithmConfig) -> tuple[float, Tensor, int]:
    """Loss, gradient [T] and number of masked tokens of `clip` with k3, one token after the other."""
    leaf = log_probs.clone().requires_grad_()
    fields = batch.fields
    losses, masked, start = [], 0, 0
    for length in batch.lengths.tolist():
        places = [place for place in range(start, start + length) if fields["weights"][place] != 0]
        start += length
        drift = [float(fields["rollout_log_probs"][t] - log_probs[t]) for t in places]
        far = bool(places) and sum(drift) / len(places) > LIMIT
        for t in places:
            anchor = fields[f"{config.ratio_to}_log_probs"][t]
            ratio, advantage = torch.exp(leaf[t] - anchor), fields["advantages"][t]
            policy = -min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
            if far and advantage < 0:
                policy, masked = 0 * policy, masked + 1
            d = fields["reference_log_probs"][t] - leaf[t]
            kl = torch.exp(d) - 1 - d
            # Also where ratios are to the old policy the tokens are the sampler's.
            weight = torch.exp(leaf[t] - fields["rollout_log_probs"][t]) if config.kl_unbiased else 1.0
            losses.append(fields["weights"][t] * (policy + 0.3 * weight * kl))
    loss = torch.stack(losses).sum()
    loss.backward()
    assert leaf.grad is not None
    return float(loss), leaf.grad, masked


@given(sequences, st.integers(0, 100), st.sampled_from(["old", "rollout"]), st.booleans())
def test_loss_and_gradient_are_those_of_the_formula(drawn, seed: int, ratio_to: str, unbiased: bool) -> None:
    batch, log_probs = random_batch(drawn, seed)
    config = AlgorithmConfig(ratio_to=ratio_to, kl_coefficient=0.3, kl_unbiased=unbiased, off_policy_mask=LIMIT)
    loss, gradient, metrics = run(PolicyObjective(config), batch, log_probs, [list(range(len(batch)))])
    expected, expected_gradient, masked = by_the_formula(batch, log_probs, config)
    assert float(loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-9)
    share = masked / int((batch.fields["weights"] != 0).sum())
    assert metrics.values()["policy/off_policy_masked"] == pytest.approx(share)


@given(sequences, st.integers(0, 100), st.sampled_from(["old", "interpolated"]))
def test_decoupled_ppo_token_by_token(drawn, seed: int, ratio_to: str) -> None:
    """The clip is around the proximal policy, and the weight leads there from the one that sampled (AReaL, eq. 5)."""
    batch, log_probs = random_batch(drawn, seed)
    fields, leaf, losses = batch.fields, log_probs.clone().requires_grad_(), []
    for t in (fields["weights"] != 0).nonzero().flatten().tolist():
        behaviour = fields["rollout_log_probs"][t]
        proximal = fields["old_log_probs"][t]
        if ratio_to == "interpolated":
            d = int(fields["staleness"][t])
            # Version v - d sampled and version v is asked for; the present policy is becoming version v + 1.
            proximal = (behaviour + d * log_probs[t]) / (d + 1)
        weight = min(math.exp(proximal - behaviour), 1.2)
        ratio, advantage = torch.exp(leaf[t] - proximal), fields["advantages"][t]
        clipped = torch.clamp(ratio, 0.8, 1.2) * advantage
        losses.append(-fields["weights"][t] * weight * torch.minimum(ratio * advantage, clipped))
    expected = torch.stack(losses).sum()
    expected.backward()
    truncated = CorrectionConfig("token_importance", high=1.2)
    config = AlgorithmConfig(ratio_to=ratio_to, updates_per_step=2, corrections=[truncated])
    loss, gradient, _ = run(PolicyObjective(config), batch, log_probs, [list(range(len(batch)))])
    assert float(loss) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)
    assert leaf.grad is not None
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-9)


def test_ratios_to_the_rollout_need_no_old_log_probs_and_have_no_part_in_the_difference_of_engine_and_trainer() -> None:
    batch, log_probs = random_batch([(2, [True] * 4), (1, [True] * 3)], 0)
    objective = PolicyObjective(AlgorithmConfig(ratio_to="rollout"))
    loss, gradient, metrics = run(objective, batch, log_probs, [[0, 1]])
    fields = {name: values for name, values in batch.fields.items() if name != "old_log_probs"}
    again = run(objective, RaggedBatch(batch.tokens, batch.lengths, fields), log_probs, [[0, 1]])
    assert again[0] == loss
    assert torch.equal(again[1], gradient)
    trained = batch.fields["weights"] != 0
    difference = (log_probs - batch.fields["rollout_log_probs"])[trained]
    values = metrics.values()
    assert values["log_prob_difference/mean"] == pytest.approx(float(difference.abs().mean()))
    assert values["policy/ratio_mean"] == pytest.approx(float(difference.exp().mean()))
    # After an update it would be the policy's way as well, and be warned of as if engine and trainer disagreed.
    several = PolicyObjective(AlgorithmConfig(ratio_to="rollout", updates_per_step=2))
    _, _, later = run(several, batch, log_probs, [[0, 1]])
    assert values.keys() - later.values().keys() == {"log_prob_difference/mean", "log_prob_difference/max"}


def test_a_mask_beside_ratios_to_the_rollout_is_of_the_present_policy() -> None:
    batch, log_probs = random_batch([(1, [True] * 6)], 3)
    band = CorrectionConfig("token_band", 0.9, 1.1)
    objective = PolicyObjective(AlgorithmConfig(ratio_to="rollout", corrections=[band]))
    _, _, metrics = run(objective, batch, log_probs, [[0]])
    ratio = (log_probs - batch.fields["rollout_log_probs"]).exp()[1:]
    outside = ((ratio < 0.9) | (ratio > 1.1)).double().mean()
    assert 0 < outside < 1
    assert metrics.values()["correction/masked_tokens"] == pytest.approx(float(outside))


def test_a_choice_of_tokens_compares_with_the_policy_that_ratios_are_to() -> None:
    """Clip-Cov takes none of the tokens that the clip cuts off already."""
    batch, log_probs = random_batch([(1, [True] * 12)], 1)
    far = replace(batch, fields={**batch.fields, "rollout_log_probs": torch.full((13,), -50.0, dtype=torch.float64)})
    config = AlgorithmConfig(
        policy_loss="clip_cov",
        policy_loss_options={"covariance_fraction": 1.0, "covariance_low": -99.0, "covariance_high": 99.0},
    )
    to_old = PolicyObjective(config).select(far, log_probs, seed=(0,))
    to_rollout = PolicyObjective(replace(config, ratio_to="rollout")).select(far, log_probs, seed=(0,))
    positive = batch.fields["advantages"] > 0
    assert bool(to_old[positive].any())
    assert not bool(to_rollout[positive].any())


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy, and log-probs of the one that sampled and of the reference, over seven tokens."""
    logits, sampler, reference = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).double()
    return logits.requires_grad_(), torch.log_softmax(sampler, -1), torch.log_softmax(reference, -1)


@pytest.mark.parametrize("name", UNBIASED)
def test_off_policy_the_mean_of_the_weighted_kl_is_the_kl_and_so_is_its_gradient(name: str) -> None:
    logits, sampler, reference = distributions()
    policy = torch.log_softmax(logits, -1)
    exact = (policy.exp() * (policy - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = KL_ESTIMATORS[name](policy, reference)
    weighted = (sampler.exp() * importance_weighted(estimate, policy - sampler)).sum()
    torch.testing.assert_close(weighted, exact)
    (gradient,) = torch.autograd.grad(weighted, logits, retain_graph=True)
    torch.testing.assert_close(gradient, expected)
    plain = (sampler.exp() * estimate).sum()
    (biased,) = torch.autograd.grad(plain, logits)
    assert not torch.allclose(plain, exact, rtol=0.01)
    assert not torch.allclose(biased, expected, rtol=0.01)


def test_the_weight_of_a_lost_policy_is_finite() -> None:
    log_ratio = torch.tensor([300.0], requires_grad=True)
    importance_weighted(torch.ones(1), log_ratio).sum().backward()
    assert log_ratio.grad is not None
    assert bool(log_ratio.grad.isfinite())


rows = st.lists(
    st.lists(st.tuples(st.floats(-1, 1), st.sampled_from([-2.0, 0.0, 1.0])), max_size=6), min_size=1, max_size=6
).filter(any)


@given(rows, st.floats(0, 0.5))
def test_the_mask_one_response_after_the_other(drawn, limit: float) -> None:
    log_ratio = torch.tensor([x for row in drawn for x, _ in row], dtype=torch.float64)
    advantages = torch.tensor([a for row in drawn for _, a in row], dtype=torch.float64)
    kept = off_policy_sequence_mask(log_ratio, advantages, Ragged(torch.tensor([len(row) for row in drawn])), limit)
    expected = []
    for row in filter(None, drawn):
        distance = -math.fsum(x for x, _ in row) / len(row)
        if abs(distance - limit) < 1e-9:
            return
        expected += [0.0 if advantage < 0 and distance > limit else 1.0 for _, advantage in row]
    assert kept.tolist() == expected


def test_a_response_at_the_limit_stays_and_what_is_no_number_shows() -> None:
    ragged, worse = Ragged(torch.tensor([2, 1])), torch.tensor([-1.0, -1.0, -1.0])
    assert off_policy_sequence_mask(torch.tensor([-0.25, -0.75, -0.6]), worse, ragged, 0.5).tolist() == [1, 1, 0]
    assert off_policy_sequence_mask(torch.tensor([0.1, float("nan"), 0.1]), worse, ragged, 0.5).isnan().tolist() == [
        1,
        1,
        0,
    ]
