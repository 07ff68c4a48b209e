"""Score sampled groups: the reward function, the penalty of long responses, the reward model."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from converters.errors import UserError
from megarl.algorithms.finite import check_finite
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.data import Prompt, PromptGroup, Trajectory
from megarl.rewards import (
    OVERLONG,
    REWARD_MODEL,
    Outcome,
    PendingScores,
    RewardLost,
    RewardTimedOut,
    Score,
    reward_arguments,
)
from megarl.schema import RewardConfig
from megarl.stages.batch import whole


def begin_scoring(pending: PendingScores, group: PromptGroup, tokenizer: PreTrainedTokenizerBase) -> None:
    """Begin scoring all members of a group by their text without special tokens."""
    pending.add(
        {
            (group.ordinal, number): _arguments(group.prompt, trajectory, tokenizer)
            for number, trajectory in enumerate(group.members)
        }
    )


def with_outcomes(
    group: PromptGroup, outcomes: Mapping[Hashable, Outcome], config: RewardConfig, max_response_tokens: int | None
) -> PromptGroup:
    """Enter the score, or the failure, of every member into the group.

    With `max_response_tokens`, the soft penalty of `reward.overlong_buffer_tokens` is added; with None it is not.
    """
    members = [
        _with_outcome(trajectory, outcomes[group.ordinal, number], config, max_response_tokens)
        for number, trajectory in enumerate(group.members)
    ]
    count = len(group.trajectories)
    return group.with_members(members[:count], *members[count:])


def with_model_scores(groups: Sequence[PromptGroup], model: TrainerGroup, weight: float) -> list[PromptGroup]:
    """Add `weight` times the reward model's score to the reward of every response that has one.

    Raises UserError naming the prompt of a response whose score is not finite.
    """
    sampled = [(group, each) for group in groups for each in group.trajectories if each.score]
    greedy = [(group, group.baseline) for group in groups if group.baseline and group.baseline.score]
    scored = [*sampled, *greedy]
    if not scored:
        return list(groups)
    scores = model.scores(whole([each for _, each in scored]))
    prompts = [group.prompt for group, _ in scored]
    check_finite(
        "reward model's score",
        scores,
        lambda index: f"a response to prompt {prompts[index].index} ({prompts[index].data_source})",
    )
    added = [weight * value for value in scores.tolist()]
    of_sampled, of_greedy = iter(added[: len(sampled)]), iter(added[len(sampled) :])
    return [
        group.with_members(
            [_plus(each, REWARD_MODEL, next(of_sampled)) if each.score else each for each in group.trajectories],
            _plus(group.baseline, REWARD_MODEL, next(of_greedy)) if group.baseline and group.baseline.score else None,
        )
        for group in groups
    ]


def overlong_penalty(tokens: int, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """DAPO's soft penalty for long responses (arXiv:2503.14476, equation 13), at most 0.

    min(-(tokens - (max_tokens - buffer_tokens)) / buffer_tokens * factor, 0)
    """
    over = tokens - (max_tokens - buffer_tokens)
    return min(-over / buffer_tokens * factor, 0.0)


def text_of(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of everything after the first prompt, without special tokens."""
    first, *others = trajectory.turns
    if first.text is not None and not others:
        return first.text
    # Not batch_decode: for an empty list it returns one text.
    return tokenizer.decode(trajectory.response_ids, skip_special_tokens=True)


def _arguments(prompt: Prompt, trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return reward_arguments(
        data_source=prompt.data_source,
        solution_str=text_of(trajectory, tokenizer),
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        response_tokens=trajectory.sampled_tokens,
    )


def _with_outcome(
    trajectory: Trajectory, outcome: Outcome, config: RewardConfig, max_response_tokens: int | None
) -> Trajectory:
    """Enter the score, or the reason why there is none, into the trajectory."""
    if isinstance(outcome, Score):
        scored = replace(trajectory, score=outcome)
    elif not isinstance(outcome, RewardTimedOut):
        return replace(trajectory, failure="lost" if isinstance(outcome, RewardLost) else "failed")
    elif config.on_timeout == "zero":
        scored = replace(trajectory, score=Score(0.0), failure="timed_out")
    else:
        return replace(trajectory, failure="timed_out")
    if max_response_tokens is None or config.overlong_buffer_tokens == 0:
        return scored
    buffer, factor = config.overlong_buffer_tokens, config.overlong_penalty
    return _plus(scored, OVERLONG, overlong_penalty(trajectory.sampled_tokens, max_response_tokens, buffer, factor))


def _plus(trajectory: Trajectory, name: str, value: float) -> Trajectory:
    """Add a term to the trajectory's score."""
    score, added = trajectory.scored, {name: value}
    return replace(trajectory, score=Score(score.value + value, score.parts | added, score.terms | added))


def check_any_scored(groups: Sequence[PromptGroup]) -> None:
    """Raise UserError if no response has a score."""
    members = [each for group in groups for each in group.members]
    if all(each.score is None for each in members):
        timed_out, lost = (sum(each.failure == how for each in members) for how in ("timed_out", "lost"))
        raise UserError(
            f"the reward function failed for all {len(members)} responses ({timed_out} took too long, the processes of "
            f"{lost} were killed) and none is left: repair it (with reward.on_error=stop and reward.on_timeout=stop the"
            " first failure is shown)"
        )
