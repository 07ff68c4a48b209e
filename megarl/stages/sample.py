"""Prompts to scored trajectories: the responses are scored while others are still being sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megarl.algorithms.finite import check_finite
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.trainer_group import TrainerGroup
from megarl.data import Prompt, Trajectory
from megarl.rewards import Score
from megarl.rollout.protocol import SamplingParameters
from megarl.stages.reward import Scoring
from megarl.stages.rollout import greedy, rollout, sequences
from megarl.tracking.clock import Clock
from megatron_ext.packing import RaggedBatch

REWARD_MODEL = "reward_model"
"""The name of a reward model's score among the terms of a reward."""


@dataclass(frozen=True)
class Experience:
    """Result of a rollout."""

    scored: list[Trajectory]
    """Trajectories with a reward; responses to one prompt share a `group` and are neighbours."""
    sampled: list[Trajectory]
    """All responses."""
    failed: int = 0
    """Responses whose reward failed and was dropped."""
    timed_out: int = 0
    """Responses whose scoring took too long."""


def sample(
    engines: EngineGroup,
    scoring: Scoring,
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParameters],
    clock: Clock,
    *,
    with_baselines: bool = False,
    add_scores: Callable[[list[Trajectory]], list[Trajectory]] | None = None,
) -> Experience:
    """Sample responses to every prompt and score them, `add_scores` after the rewards are there.

    `with_baselines` samples and scores one greedy response more to each prompt, in the same way, whose reward the
    others carry; where it could not be scored, the others are left out with it.
    """
    with clock.stage("rollout"):
        try:
            sampled = _rollout(engines, scoring, prompts, sampling, with_baselines=with_baselines)
        except BaseException:
            scoring.cancel()
            raise
    with clock.stage("reward"):
        rewarded = scoring.finish()
        scored = add_scores(rewarded.trajectories) if add_scores else rewarded.trajectories
    if with_baselines:
        scored = _compared(scored, len(prompts))
    return Experience(scored, sampled[: sum(each.samples for each in sampling)], rewarded.failed, rewarded.timed_out)


def _rollout(
    engines: EngineGroup,
    scoring: Scoring,
    prompts: Sequence[Prompt],
    sampling: Sequence[SamplingParameters],
    *,
    with_baselines: bool,
) -> list[Trajectory]:
    if not with_baselines:
        return rollout(engines, prompts, sampling, scoring.add)
    return rollout(engines, [*prompts, *prompts], [*sampling, *map(greedy, sampling)], scoring.add)


def _compared(trajectories: Sequence[Trajectory], prompts: int) -> list[Trajectory]:
    """The responses of the groups below `prompts`, with the rewards of the greedy ones, whose groups follow."""
    baselines = {each.group - prompts: each.reward for each in trajectories if each.group >= prompts}
    return [replace(each, baseline_reward=baselines[each.group]) for each in trajectories if each.group in baselines]


def with_model_scores(trajectories: Sequence[Trajectory], model: TrainerGroup, weight: float) -> list[Trajectory]:
    """The trajectories with the score of a reward model, times `weight`, added to their rewards.

    Raises UserError for a score that is not a finite number, naming the response.
    """
    scores = model.scores(RaggedBatch(*sequences(trajectories)))
    check_finite("reward model's score", scores, lambda index: f"response {index} of the step")
    added = [{REWARD_MODEL: weight * score} for score in scores.tolist()]
    return [
        replace(
            each,
            score=Score(each.scored.value + own[REWARD_MODEL], each.scored.parts | own, each.scored.terms | own),
        )
        for each, own in zip(trajectories, added, strict=True)
    ]
