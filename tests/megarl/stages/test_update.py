"""Metrics of an update, and the KL that it gives by value."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algorithms import Metrics, PolicyObjective
from megarl.algorithms.metrics import Mean
from megarl.cluster.trainer.batch import Batch
from megarl.stages.fields import LearnedModel
from megarl.stages.update import update, update_policy
from megatron_ext.objective import StepResult

BATCH = Batch(np.array([2]), [(np.array([1, 2]),)])


class Trainer:
    """Two data-parallel ranks, whose KL of the tokens is as given for each optimizer step."""

    def __init__(self, steps: Sequence[Sequence[Sequence[float]]]) -> None:
        self.steps = iter(steps)

    def train_step(self, batch, objective, *, temperature):
        ranks = next(self.steps)
        kl = [Mean.of(torch.tensor(each)) if each else None for each in ranks]
        parts = [Metrics({"policy/loss": torch.tensor(1.0)}, kl_to_reference=each) for each in kl]
        return StepResult(parts, 2.0, 0.1)


def test_the_kl_to_the_reference_is_the_mean_over_tokens_then_over_steps() -> None:
    trainer = Trainer([[[1.0], [2.0, 6.0]], [[5.0], [5.0]]])
    metrics, kl = update_policy(trainer, [BATCH, BATCH], PolicyObjective(), temperature=1.0, seed=(0, 0))
    assert kl == pytest.approx(4.0)
    assert metrics["policy/kl_to_reference"] == kl
    assert (metrics["policy/loss"], metrics["policy/gradient_norm"]) == (2.0, 2.0)


def test_without_a_reference_there_is_no_kl() -> None:
    metrics, kl = update_policy(Trainer([[[], []]]), [BATCH], PolicyObjective(), temperature=1.0, seed=(0, 0))
    assert kl is None
    assert "policy/kl_to_reference" not in metrics
    with pytest.raises(ValueError, match="different metrics"):
        update_policy(Trainer([[[1.0], []]]), [BATCH], PolicyObjective(), temperature=1.0, seed=(0, 0))


@pytest.mark.parametrize(
    ("model", "prefix"), [("policy", "policy"), ("critic", "value"), ("implicit_reward_model", "prime")]
)
def test_what_is_trained_names_the_norm(model: LearnedModel, prefix: str) -> None:
    metrics = update(Trainer([[[], []]]), [BATCH], PolicyObjective(), temperature=1.0, model=model)
    of_loss = {"policy/loss": 2.0}
    assert metrics == {**of_loss, f"{prefix}/gradient_norm": 2.0, f"{prefix}/learning_rate": 0.1}


class Played:
    """A trainer whose optimizer steps have these results."""

    def __init__(self, *results: StepResult) -> None:
        self.results = iter(results)

    def train_step(self, batch, objective, *, temperature):
        return next(self.results)


def test_experts_are_counted_over_all_steps_and_losses_are_means_of_them() -> None:
    loss = [Metrics({"policy/loss": torch.tensor(1.0)})]
    steps = (
        StepResult(loss, 2.0, 0.1, torch.tensor([[6, 2]]), torch.tensor([4, 1, 4, 1]), torch.tensor([[1.0, 0.5]])),
        StepResult(loss, 5.0, 0.2, torch.tensor([[2, 6]]), torch.tensor([4, 2, 2, 2]), torch.tensor([[3.0, 0.0]])),
    )
    steps = tuple(replace(each, router_losses={"z_loss": each.gradient_norm}) for each in steps)
    metrics = update(Played(*steps), [BATCH, BATCH], PolicyObjective(), temperature=1.0)
    assert metrics.pop("experts/load/layer_0").counts == (8, 8)
    assert metrics == {
        "policy/loss": 1.0,
        "policy/gradient_norm": 3.5,
        "policy/learning_rate": 0.2,
        "experts/imbalance_mean": 1.0,
        "experts/imbalance_max": 1.0,
        "experts/imbalance/layer_0": 1.0,
        "experts/idle_fraction": 0.0,
        "experts/z_loss": 3.5,
        "experts/changed_by_replay": 0.375,
        "experts/tokens_changed_by_replay": 0.5,
        "mtp/loss/layer_1": 2.0,
        "mtp/accuracy/layer_1": 0.25,
    }
    steps = tuple(replace(each, replayed=None) for each in steps)
    of_critic = update(Played(*steps), [BATCH, BATCH], PolicyObjective(), temperature=1.0, model="critic")
    assert of_critic.keys() == {"policy/loss", "value/gradient_norm", "value/learning_rate"}
