"""Results of a rollout: turns, the trajectory that they make, and its score."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from megarl.data.prompts import Prompt
from megarl.rewards.scoring import Score

FinishReason = Literal["stop", "length", "abort"]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Turn:
    """One answer of the policy, and what was appended to the conversation before it.

    `prompt_ids` int32[P] are the tokens since the turn before, of a first turn the whole prompt; they are never trained
    on. The others have one entry per sampled token: `token_ids` int32[T], which include the one that ended the turn;
    `log_probs` float32[T] under the distribution sampled from, log_softmax(logits / temperature) after top-p and top-k,
    log_softmax(logits) if greedy; `versions` int32[T], that of the weights which sampled the token. A turn that ended
    with "abort" was cut off and could go on.

    Example: Turn.of([5, 9], [40, 2], log_probs=[-0.7, -0.1], versions=[3, 3], finish_reason="stop")
    """

    prompt_ids: IntArray
    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"a turn of {len(self.token_ids)} tokens, {len(self.log_probs)} log-probs and "
                f"{len(self.versions)} versions"
            )

    @classmethod
    def of(
        cls,
        prompt_ids: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        log_probs: npt.ArrayLike,
        versions: npt.ArrayLike,
        finish_reason: FinishReason,
    ) -> "Turn":
        """From any sequences of numbers; arrays of the right type are taken as they are."""
        return cls(
            np.asarray(prompt_ids, dtype=np.int32),
            np.asarray(token_ids, dtype=np.int32),
            np.asarray(log_probs, dtype=np.float32),
            np.asarray(versions, dtype=np.int32),
            finish_reason,
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Turn)
            and self.finish_reason == other.finish_reason
            and all(map(np.array_equal, self._arrays(), other._arrays()))
        )

    __hash__ = None  # type: ignore[assignment]

    def _arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self.prompt_ids, self.token_ids, self.log_probs, self.versions


@dataclass(frozen=True)
class Trajectory:
    """One response to a prompt, as sampled; those of one `group` answer the same prompt in the same step.

    `score` is None until the reward stage has run. `baseline_reward` is that of the greedy response to the same prompt,
    where the algorithm asks for one.
    """

    prompt: Prompt
    group: int
    turns: Sequence[Turn]
    score: Score | None = None
    baseline_reward: float | None = None

    @property
    def token_ids(self) -> IntArray:
        """int32[T]: the sampled tokens."""
        return np.concatenate([turn.token_ids for turn in self.turns])

    @property
    def log_probs(self) -> FloatArray:
        """float32[T]: those of the sampled tokens."""
        return np.concatenate([turn.log_probs for turn in self.turns])

    @property
    def versions(self) -> IntArray:
        """int32[T]: the versions of the weights that sampled them."""
        return np.concatenate([turn.versions for turn in self.turns])

    @property
    def finish_reason(self) -> FinishReason:
        """How the last turn ended."""
        return self.turns[-1].finish_reason

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
