import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_cases import (
    log_ratio_by_the_formula,
    predictions,
    random_sequences,
    run,
    seeds,
    sequence_shapes,
    units_apart,
)
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms import ImplicitRewardObjective, implicit_process_rewards
from megatron_ext.packing.packing import MicroBatch, RaggedBatch

OBJECTIVE = ImplicitRewardObjective(beta=0.2)


def prime(log_probs: Tensor, micro_batch: MicroBatch):
    return OBJECTIVE(predictions(log_probs, micro_batch), micro_batch)


def by_the_formula(batch: RaggedBatch, log_probs: Tensor, beta: float):
    log_probs = log_probs.double().requires_grad_()
    losses, right = [], 0.0
    for i in range(len(batch)):
        outcome = float(batch.fields["outcomes"][int(batch.lengths[: i + 1].sum()) - 1])
        reward = beta * log_ratio_by_the_formula(batch, log_probs, i)
        probability = 1 / (1 + torch.exp(-reward))
        losses.append(-outcome * torch.log(probability) - (1 - outcome) * torch.log(1 - probability))
        right += 0.5 if reward == 0 else float((reward > 0) == (outcome > 0.5))
    loss = sum(losses) / len(losses)
    loss.backward()
    return log_probs.grad, {"prime/loss": float(loss), "prime/accuracy": right / len(losses)}


@settings(max_examples=25)
@given(st.lists(sequence_shapes, min_size=1, max_size=6), seeds, st.data())
def test_prime_is_its_formula_however_the_responses_are_cut(shapes, seed, data) -> None:
    batch, log_probs = random_sequences(shapes, seed)
    loss, gradient, metrics = run(batch, log_probs, units_apart(data, batch), prime)
    expected_gradient, expected = by_the_formula(batch, log_probs, 0.2)
    # 0.3 is not the same number in float32: where it nearly cancels, the difference shows.
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-6, atol=1e-8)
    assert loss == pytest.approx(expected["prime/loss"], rel=1e-6)
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_a_response_without_trained_tokens_changes_nothing() -> None:
    batch, log_probs = random_sequences([(2, 3), (1, 4)], 1)
    second = torch.tensor([False] * 5 + [True] * 5)
    masked = batch.with_fields(weights=batch.fields["weights"].masked_fill(second, 0) * 2)
    loss, gradient, metrics = run(masked, log_probs, [[0, 1]], prime)
    expected_loss, expected_gradient, expected_metrics = run(masked.select([0]), log_probs, [[0]], prime)
    assert loss == expected_loss
    assert torch.equal(gradient, expected_gradient)
    assert metrics == expected_metrics


def test_process_rewards_sum_to_the_reward_of_the_response() -> None:
    batch, log_probs = random_sequences([(1, 6)], 2)
    rewards = implicit_process_rewards(log_probs, batch.fields["reference_log_probs"], beta=0.2)
    assert rewards.shape == (7,)
    expected = 0.2 * float(log_ratio_by_the_formula(batch, log_probs, 0))
    assert float(rewards.nansum()) == pytest.approx(expected, rel=1e-5)


def test_it_travels_between_processes() -> None:
    assert pickle.loads(pickle.dumps(OBJECTIVE)) == OBJECTIVE


def test_a_beta_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match=r"reward_model\.beta=0 must be above 0"):
        ImplicitRewardObjective(beta=0)
