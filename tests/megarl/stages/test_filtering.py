"""Which groups are trained on, by what their responses' rewards say."""

from dataclasses import replace

import pytest
from trajectories import group, group_of_scores, with_baseline

from converters.errors import UserError
from megarl.data import FinishReason, PromptGroup, Trajectory
from megarl.data.trajectory import Failure
from megarl.rewards import OVERLONG, REWARD_MODEL, UNCHECKED, Score
from megarl.schema import AlgorithmConfig, LoopConfig, MegarlConfig
from megarl.stages.filtering import check_refills, groups_to_train_on, left_out, teaches, without_small_groups


def outcome(right: float, penalty: float = 0.0, model: float = 0.0) -> Score:
    terms = {"score": right, OVERLONG: penalty, REWARD_MODEL: model}
    return Score(right + penalty + model, {"acc": right, **terms}, terms)


ALL_RIGHT = group_of_scores(0, outcome(1), outcome(1, -0.05))
ALL_WRONG = group_of_scores(1, outcome(0, -0.05), outcome(0, model=0.3))
MIXED = group_of_scores(2, outcome(1), outcome(1), outcome(1), outcome(0))


@pytest.mark.parametrize(
    ("filter_on", "kept"),
    [("outcome", [2]), ("acc", [2]), ("score", [2]), ("reward", [0, 1, 2]), (OVERLONG, [0, 1]), (REWARD_MODEL, [1])],
)
def test_a_group_teaches_if_its_responses_differ_in_what_is_named(filter_on: str, kept: list[int]) -> None:
    config = AlgorithmConfig(filter_on=filter_on)
    assert [each.ordinal for each in (ALL_RIGHT, ALL_WRONG, MIXED) if teaches(each, config)] == kept


def test_a_name_that_no_reward_has_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(
        UserError, match=r"filter_on=accuracy is no number .* to source, which has acc, score, overlong"
    ):
        teaches(MIXED, AlgorithmConfig(filter_on="accuracy"))


UNDECIDED = Score(0.0, {UNCHECKED: 1.0}, {"score": 0.0})


@pytest.mark.parametrize("filter_on", ["acc", "score", "outcome", "reward"])
@pytest.mark.parametrize(("score", "failure"), [(Score(0.0), "timed_out"), (UNDECIDED, None)])
def test_what_was_not_decided_counts_as_0(filter_on: str, score: Score, failure: Failure | None) -> None:
    (first, second) = ALL_RIGHT.trajectories
    undecided = replace(second, score=score, failure=failure)
    config = AlgorithmConfig(filter_on=filter_on)
    assert teaches(replace(ALL_RIGHT, trajectories=[first, undecided]), config)
    assert not teaches(replace(ALL_RIGHT, trajectories=[undecided, undecided]), config)


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [(None, None, True), (0.2, 0.8, True), (0.75, 0.75, True), (None, 0.7, False), (0.8, None, False)],
)
def test_a_group_whose_mean_is_outside_the_band_teaches_nothing(
    low: float | None, high: float | None, kept: bool
) -> None:
    assert teaches(MIXED, AlgorithmConfig(filter_low=low, filter_high=high)) == kept


@pytest.mark.parametrize(
    ("answers", "in_statistics", "taught"),
    [
        # The compared ones are all right, or one alone.
        ([(1.0, "stop"), (1.0, "stop"), (0.0, "length")], False, False),
        ([(1.0, "stop"), (0.0, "length"), (0.0, "length")], False, False),
        ([(0.0, "length"), (1.0, "length")], False, False),
        ([(1.0, "stop"), (0.0, "stop"), (0.0, "length")], False, True),
        ([(1.0, "stop"), (0.0, "length"), (0.0, "length")], True, True),
        # None is trained on.
        ([(0.0, "length"), (1.0, "length")], True, False),
    ],
)
def test_truncated_responses_count_as_far_as_they_are_compared(
    answers: list[tuple[float, FinishReason]], in_statistics: bool, taught: bool
) -> None:
    config = AlgorithmConfig(
        dynamic_sampling=True,
        train_on_truncated_responses=False,
        truncated_responses_in_statistics=in_statistics,
    )
    sampled = group(0, [1], *(([2], reward, end) for reward, end in answers))
    assert (groups_to_train_on([sampled], config) == [sampled]) == taught
    if taught:
        without_small_groups([sampled], config)


def pairs(*rewards: tuple[float, float]) -> list[PromptGroup]:
    return [group(number, [number], *(([1], reward) for reward in pair)) for number, pair in enumerate(rewards)]


def test_all_scored_groups_are_trained_on_unless_a_filter_is_set() -> None:
    groups = pairs((0, 0), (1, 1), (0, 1))
    assert groups_to_train_on(groups, AlgorithmConfig()) == groups
    for filters in ({"filter_groups": True}, {"dynamic_sampling": True}):
        (kept,) = groups_to_train_on(groups, AlgorithmConfig(**filters))
        assert kept.rewards == [0, 1]
        assert left_out(groups, [kept]) == pytest.approx(2 / 3)


def test_a_filter_leaves_all_groups_where_none_teaches_and_dynamic_sampling_none() -> None:
    groups = pairs((0, 0), (1, 1))
    assert groups_to_train_on(groups, AlgorithmConfig(filter_groups=True)) == groups
    assert left_out(groups, groups) == 0
    assert groups_to_train_on(groups, AlgorithmConfig(dynamic_sampling=True)) == []


def test_responses_without_a_score_or_a_baseline_to_compare_with_are_no_part() -> None:
    first, second = pairs((0, 1), (1, 0))
    unscored = [PromptGroup(first.prompt, 0, [*first.trajectories, without_score(first)]), second]
    assert groups_to_train_on(unscored, AlgorithmConfig()) == [first, second]
    (based,) = with_baseline([second], 1.0)
    failed = based.with_members(based.trajectories, without_score(first))
    assert groups_to_train_on([based, failed], AlgorithmConfig()) == [based]


def without_score(of: PromptGroup) -> Trajectory:
    return replace(of.trajectories[0], score=None, failure="failed")


def test_too_many_refills_end_the_run_and_say_why() -> None:
    sampled = pairs(*[(1, 1)] * 6, (0, 1))
    algorithm = AlgorithmConfig(dynamic_sampling=True, max_refills=2)
    config = MegarlConfig(algorithm=algorithm, loop=LoopConfig(prompts_per_step=3))
    kept, dropped = sampled[-1:], sampled[:-1]
    check_refills(kept, dropped, config)
    with pytest.raises(UserError, match=r"of 8 prompts only 1 of the 3 .*the mean reward is 0\.938"):
        check_refills(kept, [*dropped, dropped[0]], config)
    failed = [each.with_members([without_score(each)]) for each in (*sampled, *sampled)]
    with pytest.raises(UserError, match=r"of 14 prompts only 0 .*\(algorithm\.filter_on=outcome\): "):
        check_refills([], failed, config)
