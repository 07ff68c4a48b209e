import pytest
import torch
import verl_losses as verl
from hypothesis import given
from hypothesis import strategies as st
from policy_batches import random_batch, sequences

from megarl.algorithms import PolicyObjective
from megarl.algorithms.policy_losses.covariance import covariances, select_clip_cov, select_kl_cov
from megarl.schema import AlgorithmConfig


@pytest.mark.parametrize("case_name", verl.NAMES)
def test_kl_cov_holds_the_tokens_that_verl_holds(case_name: str) -> None:
    case = verl.case(case_name)
    log_probs, old, advantages = (case.arrays[f"in/{name}"] for name in ("log_prob", "old_log_prob", "advantages"))
    gradient = case.arrays["policy_loss/kl_cov/token_mean/is0/gradient"] * case.ragged.tokens
    held = (gradient + advantages * (log_probs - old).exp()).abs() > 0.25
    chosen = select_kl_cov(log_probs, advantages, covariance_fraction=verl.COVARIANCE_FRACTION)
    assert torch.equal(chosen, held)


@given(sequences, st.integers(0, 50), st.floats(0.01, 1), st.floats(-1, 0.5))
def test_clip_cov_draws_a_share_of_the_tokens_between_its_bounds(drawn, seed, fraction, low) -> None:
    objective = PolicyObjective(
        AlgorithmConfig(
            policy_loss="clip_cov",
            policy_loss_options={"covariance_fraction": fraction, "covariance_low": low, "covariance_high": 2.0},
        )
    )
    batch, log_probs = random_batch(drawn, seed)
    chosen = objective.select(batch, log_probs, seed=(1, 2))
    trained = (batch.fields["weights"] != 0).nonzero().squeeze(1).tolist()
    advantages, old = batch.fields["advantages"], batch.fields["old_log_probs"]
    mean_advantage = sum(float(advantages[i]) for i in trained) / len(trained)
    mean_log_prob = sum(float(log_probs[i]) for i in trained) / len(trained)
    candidates = set()
    for i in trained:
        covariance = (float(advantages[i]) - mean_advantage) * (float(log_probs[i]) - mean_log_prob)
        ratio = float((log_probs[i] - old[i]).exp())
        clipped = (advantages[i] > 0 and ratio > 1.2) or (advantages[i] < 0 and ratio < 0.8)
        if low < covariance < 2.0 and not clipped:
            candidates.add(i)
    drawn_tokens = set(chosen.nonzero().squeeze(1).tolist())
    assert drawn_tokens <= candidates
    assert len(drawn_tokens) == min(len(candidates), max(1, int(fraction * len(trained))))


def test_the_draw_is_the_same_for_the_same_seed_alone() -> None:
    objective = PolicyObjective(
        AlgorithmConfig(
            policy_loss="clip_cov",
            policy_loss_options={"covariance_fraction": 0.2, "covariance_low": -9.0, "covariance_high": 9.0},
        )
    )
    batch, log_probs = random_batch([(1, [True] * 40)], 0)
    draws = [objective.select(batch, log_probs, seed=seed) for seed in ((0, 1), (0, 1), (0, 2))]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_without_old_log_probs_the_present_ones_are_the_old() -> None:
    objective = PolicyObjective(AlgorithmConfig(policy_loss="kl_cov", policy_loss_options={"covariance_fraction": 0.1}))
    batch, log_probs = random_batch([(2, [True] * 20), (1, [False] * 3)], 0)
    fields = {name: values for name, values in batch.fields.items() if name != "old_log_probs"}
    bare = type(batch)(batch.tokens, batch.lengths, fields)
    chosen = objective.select(bare, log_probs, seed=(0,))
    assert int(chosen.sum()) == 2
    assert not bool(chosen[batch.fields["weights"] == 0].any())
    assert torch.equal(chosen, objective.select(batch, log_probs, seed=(5,))), "nothing is drawn"


def test_of_equal_covariances_the_first_are_taken() -> None:
    case = verl.case("plain")
    log_probs = torch.zeros(case.ragged.tokens)
    chosen = select_kl_cov(log_probs, case.arrays["in/advantages"], covariance_fraction=0.02)
    assert chosen.nonzero().squeeze(1).tolist() == [0, 1, 2, 3]


def test_covariances_sum_to_the_covariance() -> None:
    log_probs, advantages = torch.tensor([[1.0, 2.0, 4.0], [0.5, -1.0, 2.0]])
    expected = float(torch.cov(torch.stack([log_probs, advantages]), correction=0)[0, 1]) * 3
    assert float(covariances(log_probs, advantages).sum()) == pytest.approx(expected)


def test_no_candidate_gives_no_choice() -> None:
    case = verl.case("plain")
    tensors = (case.arrays[f"in/{name}"] for name in ("log_prob", "old_log_prob", "advantages"))
    options = {"clip_low": 0.2, "clip_high": 0.2, "covariance_fraction": 0.5}
    chosen = select_clip_cov(*tensors, torch.Generator(), **options, covariance_low=1e3, covariance_high=1e4)
    assert not bool(chosen.any())
