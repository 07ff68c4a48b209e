"""From trajectories to the batch of an update."""

import pytest
import torch

from converters.errors import UserError
from megarl.config.schema import AlgorithmConfig
from megarl.data import Prompt, Trajectory
from megarl.rewards import Score
from megarl.stages.advantage import advantage


def trajectory(group: int, prompt: list[int], response: list[int], reward: float) -> Trajectory:
    log_probs = [-0.1 * token for token in response]
    return Trajectory(
        Prompt(0, "source", prompt, "truth", {}), group, response, log_probs, [3] * len(response), "stop", Score(reward)
    )


TRAJECTORIES = [
    trajectory(0, [9, 8], [1, 2], 1.0),
    trajectory(0, [9, 8], [3], 0.0),
    trajectory(1, [7], [4, 5, 6], 0.0),
    trajectory(1, [7], [1, 1], 2.0),
]


class NoTrainer:
    """A single update and no reference model need no log-probs of the trainer."""


def test_batch_of_one_update():
    (batch,) = advantage(TRAJECTORIES, NoTrainer(), AlgorithmConfig(normalize_by_std=False), temperature=1.0)
    assert batch.tokens.tolist() == [9, 8, 1, 2, 9, 8, 3, 7, 4, 5, 6, 7, 1, 1]
    assert batch.lengths.tolist() == [4, 3, 4, 3]
    advantages = batch.fields["advantages"]
    assert advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, -0.5, 0, -1, -1, -1, 0, 1, 1]
    assert batch.fields["weights"].sum() == pytest.approx(1.0)
    assert (batch.fields["weights"] > 0).tolist() == (advantages != 0).tolist()
    expected = torch.tensor([0, 0, -0.1, -0.2, 0, 0, -0.3, 0, -0.4, -0.5, -0.6, 0, -0.1, -0.1])
    torch.testing.assert_close(batch.fields["rollout_log_probs"], expected)
    assert "old_log_probs" not in batch.fields


def test_response_left_alone_by_a_dropped_reward_is_left_out():
    (batch,) = advantage(TRAJECTORIES[1:], NoTrainer(), AlgorithmConfig(), temperature=1.0)
    assert batch.lengths.tolist() == [4, 3]


def test_nothing_to_compare_is_a_user_error():
    with pytest.raises(UserError, match="no two responses to one prompt are left"):
        advantage(TRAJECTORIES[1:3], NoTrainer(), AlgorithmConfig(), temperature=1.0)


def test_same_prompt_twice_in_a_step_makes_two_groups():
    again = [trajectory(2, [9, 8], [5], 4.0), trajectory(2, [9, 8], [6], 6.0)]
    (batch,) = advantage([*TRAJECTORIES, *again], NoTrainer(), AlgorithmConfig(normalize_by_std=False), temperature=1.0)
    # Rewards 4 and 6 are compared with each other, not with the 1 and 0 of the first time.
    assert batch.fields["advantages"][-6:].tolist() == [0, 0, -1, 0, 0, 1]
    assert batch.fields["advantages"][:4].tolist() == [0, 0, 0.5, 0.5]
