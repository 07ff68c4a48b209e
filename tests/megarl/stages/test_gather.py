"""Refilling a step until its prompts have responses that differ in reward."""

import pytest
from trajectories import trajectory

from converters.errors import UserError
from megarl.config.schema import AlgorithmConfig, LoopConfig, MegarlConfig
from megarl.stages.gather import gather
from megarl.stages.sample import Experience


class Rollouts:
    """Answers each request with groups of two responses of the given rewards, and remembers what was asked."""

    def __init__(self, *rounds: list[tuple[float, float]]) -> None:
        self.rounds = rounds
        self.asked: list[tuple[int, int]] = []

    def __call__(self, count: int, refill: int) -> Experience:
        self.asked.append((count, refill))
        rewards = self.rounds[refill]
        assert len(rewards) == count
        scored = [trajectory(g, [refill], [1], reward) for g, pair in enumerate(rewards) for reward in pair]
        return Experience(scored, scored, failed=1, timed_out=2)


def config(**algorithm) -> MegarlConfig:
    return MegarlConfig(algorithm=AlgorithmConfig(**algorithm), loop=LoopConfig(prompts_per_step=3))


def test_one_rollout_is_taken_as_it_is() -> None:
    rollouts = Rollouts([(0, 0), (1, 1), (0, 1)])
    gathered = gather(rollouts, config())
    assert len(gathered.trajectories) == 6
    assert gathered.rollouts == 1


def test_prompts_that_teach_nothing_are_replaced_by_as_many_others() -> None:
    rollouts = Rollouts([(0, 0), (1, 1), (0, 1)], [(1, 0), (0, 0)], [(0.5, 0)])
    gathered = gather(rollouts, config(dynamic_sampling=True))
    assert rollouts.asked == [(3, 0), (2, 1), (1, 2)]
    assert [t.reward for t in gathered.trajectories] == [0, 1, 1, 0, 0.5, 0]
    assert [t.group for t in gathered.trajectories] == [0, 0, 1, 1, 2, 2]
    assert [t.prompt.token_ids for t in gathered.trajectories] == [[0], [0], [1], [1], [2], [2]]
    assert gathered.rollouts == 3
    everything = gathered.experience
    assert [t.group for t in everything.scored] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (len(everything.sampled), everything.failed, everything.timed_out) == (12, 3, 6)


def test_it_gives_up_after_the_limit_and_says_why() -> None:
    rollouts = Rollouts([(1, 1), (1, 1), (0, 1)], [(1, 1), (1, 1)], [(1, 1), (1, 1)])
    with pytest.raises(UserError, match=r"after 3 rollouts of 7 prompts only 1 of the 3 .*the mean reward is 0\.929"):
        gather(rollouts, config(dynamic_sampling=True, max_refills=2))
    assert len(rollouts.asked) == 3
