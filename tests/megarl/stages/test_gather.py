"""Refilling a step until its prompts have responses that teach something, or leaving the others out."""

from dataclasses import replace

import pytest
from trajectories import trajectory

from converters.errors import UserError
from megarl.data import Trajectory
from megarl.rewards import OVERLONG, Score
from megarl.schema import AlgorithmConfig, LoopConfig, MegarlConfig
from megarl.stages.filtering import teaching_groups
from megarl.stages.gather import gather
from megarl.stages.sample import REWARD_MODEL, Experience


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


def group(number: int, *scores: Score) -> list[Trajectory]:
    return [replace(trajectory(number, [1], [1], 0.0), score=score) for score in scores]


def outcome(right: float, penalty: float = 0.0, model: float = 0.0) -> Score:
    terms = {"score": right, OVERLONG: penalty, REWARD_MODEL: model}
    return Score(right + penalty + model, {"acc": right, **terms}, terms)


ALL_RIGHT = group(0, outcome(1), outcome(1, -0.05))
ALL_WRONG = group(1, outcome(0, -0.05), outcome(0, model=0.3))
MIXED = group(2, outcome(1), outcome(1), outcome(1), outcome(0))


@pytest.mark.parametrize(
    ("filter_on", "kept"),
    [("outcome", [2]), ("acc", [2]), ("score", [2]), ("reward", [0, 1, 2]), (OVERLONG, [0, 1]), (REWARD_MODEL, [1])],
)
def test_a_group_teaches_if_its_responses_differ_in_what_is_named(filter_on: str, kept: list[int]) -> None:
    groups = teaching_groups([*ALL_RIGHT, *ALL_WRONG, *MIXED], AlgorithmConfig(filter_on=filter_on))
    assert [members[0].group for members in groups] == kept


def test_a_name_that_no_reward_has_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(
        UserError, match=r"filter_on=accuracy is no number .* to source, which has acc, score, overlong"
    ):
        teaching_groups(MIXED, AlgorithmConfig(filter_on="accuracy"))


@pytest.mark.parametrize(
    ("low", "high", "kept"), [(None, None, 1), (0.2, 0.8, 1), (0.75, 0.75, 1), (None, 0.7, 0), (0.8, None, 0)]
)
def test_a_group_whose_mean_is_outside_the_band_teaches_nothing(
    low: float | None, high: float | None, kept: int
) -> None:
    assert len(teaching_groups(MIXED, AlgorithmConfig(filter_low=low, filter_high=high))) == kept


def test_groups_that_teach_nothing_are_left_out_without_others_in_their_place() -> None:
    rollouts = Rollouts([(0, 0), (1, 1), (0, 1)])
    gathered = gather(rollouts, config(filter_groups=True))
    assert rollouts.asked == [(3, 0)]
    assert [t.reward for t in gathered.trajectories] == [0, 1]
    assert gathered.left_out == pytest.approx(2 / 3)
    assert len(gathered.experience.scored) == 6


def test_all_groups_stay_where_none_teaches() -> None:
    gathered = gather(Rollouts([(0, 0), (1, 1), (0, 0)]), config(filter_groups=True))
    assert len(gathered.trajectories) == 6
    assert gathered.left_out == 0
