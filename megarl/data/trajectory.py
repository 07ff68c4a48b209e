"""Result of a rollout of one prompt."""

from dataclasses import dataclass
from typing import Literal

from megarl.data.prompts import Prompt
from megarl.rewards.scoring import Score


@dataclass(frozen=True)
class Trajectory:
    """One response to a prompt, as sampled; those of one `group` answer the same prompt in the same step.

    `token_ids`, `log_probs` and `versions` have one entry per response token: the token, its log-probability under
    the engine's sampling distribution, and the version of the weights that produced it. `score` is None until the
    reward stage has run. `baseline_reward` is that of the greedy response to the same prompt, where the algorithm asks
    for one.
    """

    prompt: Prompt
    group: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    score: Score | None = None
    baseline_reward: float | None = None

    @property
    def scored(self) -> Score:
        """The score. Raises ValueError before the reward stage has run."""
        if self.score is None:
            raise ValueError(f"the response to prompt {self.prompt.index} has no score yet")
        return self.score

    @property
    def reward(self) -> float:
        """The score's value."""
        return self.scored.value
