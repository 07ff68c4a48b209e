import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_cases import (
    log_ratio_by_the_formula,
    pair_shapes,
    predictions,
    random_sequences,
    run,
    seeds,
    units_apart,
)
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms import PreferenceObjective, RewardModelObjective
from megatron_ext.packing.packing import MicroBatch, RaggedBatch

OBJECTIVE = PreferenceObjective(beta=0.3, label_smoothing=0.1)


def flat(pairs: list) -> list:
    return [sequence for pair in pairs for sequence in pair]


def preference(log_probs: Tensor, micro_batch: MicroBatch):
    return OBJECTIVE(predictions(log_probs, micro_batch), micro_batch)


def bradley_terry(values: Tensor, micro_batch: MicroBatch):
    return RewardModelObjective()(values[micro_batch.tokens[0]], micro_batch)


def preference_by_the_formula(batch: RaggedBatch, log_probs: Tensor, beta: float, smoothing: float):
    log_probs = log_probs.double().requires_grad_()
    pairs = range(len(batch) // 2)
    chosen, rejected = ([log_ratio_by_the_formula(batch, log_probs, 2 * i + k) for i in pairs] for k in (0, 1))
    losses, right = [], 0.0
    for i in pairs:
        margin = chosen[i] - rejected[i]
        sigmoid = 1 / (1 + torch.exp(-beta * margin))
        losses.append(-(1 - smoothing) * torch.log(sigmoid) - smoothing * torch.log(1 - sigmoid))
        right += 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0
    loss = sum(losses) / len(losses)
    loss.backward()
    expected = {
        "preference/loss": float(loss),
        "preference/accuracy": right / len(losses),
        "preference/margin": beta * float(sum(chosen) - sum(rejected)) / len(losses),
        "preference/chosen_log_ratio": float(sum(chosen)) / len(losses),
        "preference/rejected_log_ratio": float(sum(rejected)) / len(losses),
    }
    return log_probs.grad, expected


def bradley_terry_by_the_formula(batch: RaggedBatch, values: Tensor):
    values = values.double().requires_grad_()
    last = [values[int(batch.lengths[: i + 1].sum()) - 1] for i in range(len(batch))]
    margins = [last[i] - last[i + 1] for i in range(0, len(last), 2)]
    loss = sum(-torch.log(1 / (1 + torch.exp(-margin))) for margin in margins) / len(margins)
    loss.backward()
    expected = {
        "preference/loss": float(loss),
        "preference/accuracy": sum(1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins) / len(margins),
        "preference/margin": float(sum(margins)) / len(margins),
        "preference/chosen_score": float(sum(last[::2])) / len(margins),
        "preference/rejected_score": float(sum(last[1::2])) / len(margins),
    }
    return values.grad, expected


@settings(max_examples=25)
@given(pair_shapes, seeds, st.data())
def test_dpo_is_its_formula_however_the_pairs_are_cut(pairs, seed, data) -> None:
    batch, log_probs = random_sequences(flat(pairs), seed, unit=2)
    loss, gradient, metrics = run(batch, log_probs, units_apart(data, batch), preference)
    expected_gradient, expected = preference_by_the_formula(batch, log_probs, 0.3, 0.1)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-6, atol=1e-9)
    assert loss == pytest.approx(expected["preference/loss"], rel=1e-6)
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(pair_shapes, seeds, st.data())
def test_bradley_terry_is_its_formula_however_the_pairs_are_cut(pairs, seed, data) -> None:
    batch, values = random_sequences(flat(pairs), seed, unit=2)
    loss, gradient, metrics = run(batch, 9 * values, units_apart(data, batch), bradley_terry)
    expected_gradient, expected = bradley_terry_by_the_formula(batch, 9 * values)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-6, atol=1e-9)
    assert loss == pytest.approx(expected["preference/loss"], rel=1e-6)
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_policy_that_is_its_reference_prefers_nothing() -> None:
    batch, log_probs = random_sequences([(2, 3), (2, 4)], 0, unit=2)
    loss, gradient, metrics = run(batch.with_fields(reference_log_probs=log_probs), log_probs, [[0, 1]], preference)
    assert loss == pytest.approx(math.log(2))
    assert gradient.abs().max() > 0
    assert metrics["preference/accuracy"] == 0.5
    assert metrics["preference/margin"] == 0


@pytest.mark.parametrize("of_chosen", [1e4, -1e4])
def test_hopeless_pairs_still_have_a_finite_gradient(of_chosen) -> None:
    batch, log_probs = random_sequences([(1, 1), (1, 1)], 0, unit=2)
    reference = torch.tensor([0.0, of_chosen, 0.0, -of_chosen])
    loss, gradient, _ = run(batch.with_fields(reference_log_probs=reference), log_probs, [[0, 1]], preference)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()


def test_a_log_prob_inside_that_is_no_number_shows() -> None:
    batch, log_probs = random_sequences([(2, 3), (2, 3)], 0, unit=2)
    log_probs[-1] = float("nan")
    loss, _, metrics = run(batch, log_probs, [[0, 1]], preference)
    assert math.isnan(loss)
    assert math.isnan(metrics["preference/loss"])


def test_they_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(OBJECTIVE)) == OBJECTIVE
    assert pickle.loads(pickle.dumps(RewardModelObjective())) == RewardModelObjective()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"beta": 0.0}, r"preference\.beta=0\.0 must be above 0"),
        ({"beta": math.nan}, r"preference\.beta=nan"),
        ({"label_smoothing": 0.5}, r"preference\.label_smoothing=0\.5 must be at least 0 and below 0\.5"),
        ({"label_smoothing": -0.1}, r"preference\.label_smoothing=-0\.1"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(fields: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        PreferenceObjective(**fields)
