"""Tokens on keys and values that an engine kept: which they are, and how far engine and trainer are apart there."""

import numpy as np
import pytest
import torch

from megarl.algorithms import Metrics, PolicyObjective
from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.schema import AlgorithmConfig
from megarl.stages.batch import to_batch
from megarl.stages.kept_kv import with_kept_kv
from megatron_ext.log_probs import LogProbs
from megatron_ext.packing import pack


def turn(*versions: int) -> Turn:
    return Turn.of([5, 9], [40] * len(versions), [-0.5] * len(versions), versions, "stop")


LONG = [3] * 50 + [4] * 50


@pytest.mark.parametrize(
    ("versions", "expected"),
    [([4, 4], [0, 0]), ([3, 3], [0, 0]), ([3, 4, 4], [0, 1, 1]), ([2, 3, 4], [0, 0, 1]), (LONG, [0] * 50 + [1] * 50)],
)
def test_tokens_of_the_newest_weights_in_a_turn_that_older_ones_began(versions, expected) -> None:
    turns = (turn(*versions), turn(4))
    group = PromptGroup(Prompt(0, "any", [5, 9], "", {}), 0, [Trajectory(turns, "stop")])
    batch = with_kept_kv(to_batch([group], AlgorithmConfig()), [group], version=4)
    assert batch.values("on_kept_kv").int().tolist() == [0, 0, *expected, 0, 0, 0]


def test_the_gap_is_that_of_these_tokens_alone() -> None:
    group = PromptGroup(Prompt(0, "any", [5, 9], "", {}), 0, [Trajectory((turn(3, 3, 4, 4),), "stop")])
    batch = with_kept_kv(to_batch([group], AlgorithmConfig()), [group], version=4)
    ones = [(np.ones(6, np.float32) * [0, 0, 1, 1, 1, 1],)]
    whole = batch.with_fields(weights=[(ones[0][0].astype(np.float32),)], advantages=[(np.ones(6, np.float32),)])
    # Each where the token before it is: the model's outputs of that predict it.
    trainer = torch.tensor([0.0, -9.0, -9.0, -0.7, -0.9, 0.0])
    predictions = LogProbs(trainer, trainer, trainer)
    _, metrics = PolicyObjective(AlgorithmConfig())(predictions, pack(whole.load(), [0]))
    assert Metrics.merge([metrics]).values()["staleness/kept_kv_gap"] == pytest.approx(0.3)
