"""How old the weights of each token are; tokens on kept keys and values, and how far engine and trainer are apart."""

import numpy as np
import pytest
import torch

from megarl.algorithms import Metrics, PolicyObjective
from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.schema import AlgorithmConfig, MegarlConfig, ScheduleConfig
from megarl.stages.batch import to_batch
from megarl.stages.staleness import with_staleness
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing.packing import pack


def turn(*versions: int) -> Turn:
    return Turn.of([5, 9], [40] * len(versions), [-0.5] * len(versions), versions, "stop")


KEEP = MegarlConfig(schedule=ScheduleConfig(in_flight="keep"))
INTERPOLATED = MegarlConfig(algorithm=AlgorithmConfig(ratio_to="interpolated"))
LONG = [3] * 50 + [4] * 50


@pytest.mark.parametrize(
    ("versions", "expected"),
    [([4, 4], [0, 0]), ([3, 3], [0, 0]), ([3, 4, 4], [0, 1, 1]), ([2, 3, 4], [0, 0, 1]), (LONG, [0] * 50 + [1] * 50)],
)
def test_tokens_of_the_newest_weights_in_a_turn_that_older_ones_began(versions, expected) -> None:
    turns = (turn(*versions), turn(4))
    group = PromptGroup(Prompt(0, "any", [5, 9], "", {}), 0, [Trajectory(turns, "stop")])
    batch = with_staleness(to_batch([group], AlgorithmConfig()), [group], 4, KEEP)
    assert batch.values("on_kept_kv").int().tolist() == [0, 0, *expected, 0, 0, 0]


@pytest.mark.parametrize("versions", [[2, 3, 4], LONG])
def test_the_age_of_every_sampled_token_for_interpolated_ratios(versions: list[int]) -> None:
    group = PromptGroup(Prompt(0, "any", [5, 9], "", {}), 0, [Trajectory((turn(*versions), turn(3)), "stop")])
    batch = with_staleness(to_batch([group], AlgorithmConfig()), [group], 4, INTERPOLATED)
    assert batch.values("staleness").tolist() == [0, 0, *(4 - version for version in versions), 0, 0, 1]
    assert "on_kept_kv" not in batch.fields


def test_the_gap_is_that_of_these_tokens_alone() -> None:
    group = PromptGroup(Prompt(0, "any", [5, 9], "", {}), 0, [Trajectory((turn(3, 3, 4, 4),), "stop")])
    batch = with_staleness(to_batch([group], AlgorithmConfig()), [group], 4, KEEP)
    ones = [(np.ones(6, np.float32) * [0, 0, 1, 1, 1, 1],)]
    whole = batch.with_fields(weights=[(ones[0][0].astype(np.float32),)], advantages=[(np.ones(6, np.float32),)])
    # Each where the token before it is: the model's outputs of that predict it.
    trainer = torch.tensor([0.0, -9.0, -9.0, -0.7, -0.9, 0.0])
    predictions = LogProbs(trainer, trainer, trainer)
    _, metrics = PolicyObjective(AlgorithmConfig())(predictions, pack(whole.load(), [0]))
    assert Metrics.merge([metrics]).values()["staleness/kept_kv_gap"] == pytest.approx(0.3)
