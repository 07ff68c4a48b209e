"""Trajectories and groups made by hand."""

from collections.abc import Sequence
from dataclasses import replace

from megarl.data import FinishReason, Prompt, PromptGroup, Trajectory, Turn
from megarl.rewards import Score
from megarl.schema import RolloutConfig

SHORT_RUN = RolloutConfig(max_response_tokens=4)


def trajectory(prompt: list[int], response: list[int], reward: float, end: FinishReason = "stop") -> Trajectory:
    """One turn; a token's log-prob is minus a tenth of it."""
    turn = Turn.of(prompt, response, [-0.1 * token for token in response], [3] * len(response), end)
    return Trajectory((turn,), end, Score(reward, {}, {"score": reward}))


def group(
    ordinal: int, prompt: list[int], *answers: tuple[list[int], float] | tuple[list[int], float, FinishReason]
) -> PromptGroup:
    """A prompt with responses: tokens, reward and, if not "stop", how it ended."""
    members = [trajectory(prompt, *answer) for answer in answers]
    return PromptGroup(Prompt(0, "source", prompt, "truth", {}), ordinal, members)


def group_of_scores(ordinal: int, *scores: Score) -> PromptGroup:
    """A prompt with one response of a token for each score."""
    made = group(ordinal, [1], *(([1], 0.0) for _ in scores))
    return made.with_members([replace(each, score=own) for each, own in zip(made.trajectories, scores, strict=True)])


def with_baseline(groups: Sequence[PromptGroup], reward: float) -> list[PromptGroup]:
    """The groups with a greedy response of `reward`."""
    return [each.with_members(each.trajectories, trajectory(each.prompt.token_ids, [1], reward)) for each in groups]
