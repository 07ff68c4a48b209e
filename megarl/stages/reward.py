"""Trajectories to scored trajectories."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from converters.errors import UserError
from megarl.data import Trajectory
from megarl.rewards import OVERLONG, RewardSample, Score, Scorer


@dataclass(frozen=True)
class Rewarded:
    """The trajectories that have a score, and how many samples failed or timed out."""

    trajectories: list[Trajectory]
    failed: int
    timed_out: int


class Scoring:
    """The reward stage of one step, beside its rollout: responses are added as they are sampled.

    With `max_response_tokens`, responses bear the soft penalty of `reward.overlong_buffer_tokens`; without, as in an
    evaluation, none does.
    """

    def __init__(
        self, scorer: Scorer, tokenizer: PreTrainedTokenizerBase, *, max_response_tokens: int | None = None
    ) -> None:
        self._batch = scorer.begin()
        self._config = scorer.config
        self._tokenizer = tokenizer
        self._max_response_tokens = max_response_tokens
        self._trajectories: list[Trajectory] = []

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Begin to score responses.

        The text that is scored leaves special tokens out; what is trained on stays the sampled tokens. Raises
        UserError if no reward is for a data_source.
        """
        for trajectory in trajectories:
            # Not batch_decode: of no responses it makes one text.
            text = self._tokenizer.decode(trajectory.token_ids, skip_special_tokens=True)
            self._batch.add(
                RewardSample(
                    data_source=trajectory.prompt.data_source,
                    solution=text,
                    ground_truth=trajectory.prompt.ground_truth,
                    extra_info=trajectory.prompt.extra_info,
                    response_tokens=len(trajectory.token_ids),
                )
            )
        self._trajectories += trajectories

    def finish(self) -> Rewarded:
        """Wait for all scores; trajectories come by group, those of one group in the order they were added.

        Trajectories whose reward failed or timed out are left out where the configuration says so. Raises RewardFailed
        with the sample if it says to stop, UserError if none is left.
        """
        scored = self._batch.finish()
        trajectories = [
            replace(trajectory, score=self._shaped(score, len(trajectory.token_ids)))
            for trajectory, score in zip(self._trajectories, scored.scores, strict=True)
            if score is not None
        ]
        if not trajectories:
            raise UserError(
                f"the reward function failed for all {len(self._trajectories)} responses ({scored.timed_out} took too "
                "long), and reward.on_error=drop and reward.on_timeout=drop leave none: repair it (with stop, the "
                "first failure is shown)"
            )
        return Rewarded(sorted(trajectories, key=lambda t: t.group), scored.failed, scored.timed_out)

    def cancel(self) -> None:
        """Score nothing more; for a rollout that failed."""
        self._batch.cancel()

    def _shaped(self, score: Score, tokens: int) -> Score:
        buffer = self._config.overlong_buffer_tokens
        if self._max_response_tokens is None or buffer == 0:
            return score
        penalty = overlong_penalty(tokens, self._max_response_tokens, buffer, self._config.overlong_penalty)
        added = {OVERLONG: penalty}
        return Score(score.value + penalty, score.parts | added, score.terms | added)


def overlong_penalty(tokens: int, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """DAPO's soft penalty of long responses (arXiv 2503.14476, equation 13), at most 0.

    min(-(tokens - (max_tokens - buffer_tokens)) / buffer_tokens * factor, 0)
    """
    over = tokens - (max_tokens - buffer_tokens)
    return min(-over / buffer_tokens * factor, 0.0)


def reward_metrics(scored: Sequence[Trajectory], dropped: int, timed_out: int = 0) -> dict[str, float]:
    """Statistics of the rewards, of those of each data source, and of their named parts."""
    rewards = np.array([trajectory.reward for trajectory in scored])
    parts: dict[str, list[float]] = defaultdict(list)
    sources: dict[str, list[float]] = defaultdict(list)
    for trajectory in scored:
        sources[trajectory.prompt.data_source].append(trajectory.reward)
        for name, value in trajectory.scored.parts.items():
            parts[name].append(value)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "reward/dropped": float(dropped),
        "reward/timed_out": float(timed_out),
        **{f"reward/source/{name}/mean": float(np.mean(values)) for name, values in sources.items()},
        **{f"reward/part/{name}": float(np.mean(values)) for name, values in parts.items()},
    }
