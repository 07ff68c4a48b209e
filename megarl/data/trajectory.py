"""Results of a rollout: turns, the trajectory that they form, and the group of all samples of a drawn prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megarl.data.prompts import Prompt
from megarl.data.stretches import (
    Array,
    RunLengthArray,
    StoredArray,
    Stretch,
    Values,
    constant,
    fetch,
    fetch_concatenated,
    is_copied,
    run_length_encoded,
)
from megarl.rewards.scoring import Score

FinishReason = Literal["stop", "length", "abort"]
Failure = Literal["failed", "timed_out", "lost"]
"""Reasons why a response has no score from the reward function."""
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
# Texts with at least this many characters are sent as bytes.
_LONG_TEXT = 8192
# Turns with at least this many tokens have their versions run-length-encoded.
_RUN_LENGTH_FROM_TOKENS = 64


@dataclass(frozen=True, eq=False)
class Turn:
    """One answer of the policy, and the tokens that were appended to the conversation before it.

    `prompt_ids` int32[P]: tokens since the last turn, for a first turn the whole prompt; never trained on.

    Per sampled token: `token_ids` int32[T], including the one that ended the turn; `log_probs` float32[T] under the
    distribution that was sampled from, log_softmax(logits / temperature) after top-p and top-k, or log_softmax(logits)
    if greedy; `versions` int32[T], the version of the weights that sampled the token.

    A turn that ended with "abort" was cut off and can be continued.

    Between processes, long arrays stay in the object store of the machine that sampled them.

    Example: Turn.of([5, 9], [40, 2], log_probs=[-0.7, -0.1], versions=[3, 3], finish_reason="stop")
    """

    prompt_ids: IntArray | StoredArray
    token_ids: IntArray | StoredArray
    log_probs: FloatArray | StoredArray
    versions: IntArray | RunLengthArray
    finish_reason: FinishReason
    text: str | None = None
    """Text of the sampled tokens without special tokens, beginning with tokens that the request continues; None if the
    engine did not decode it, as for short turns."""
    routed_experts: Values = ()
    """Experts of each of the P + T tokens, if the engine was asked for them and the turn was not cut: byte records
    (`megatron_ext.routing.routed_experts`). The record of the last token is meaningless, since that token was not fed
    to the model."""
    cached_tokens: int | None = None
    """How many tokens of the conversation before the sampled ones were in the engine's prefix cache; None if it does
    not say, or another engine continued the turn. Ignored by ==."""

    def __post_init__(self) -> None:
        versions = len(self.versions)
        if not len(self.token_ids) == len(self.log_probs) == versions:
            raise ValueError(
                f"a turn of {len(self.token_ids)} tokens, {len(self.log_probs)} log-probs and {versions} versions"
            )
        tokens, records = len(self.prompt_ids) + versions, sum(map(len, self.routed_experts))
        if self.routed_experts and records != tokens:
            raise ValueError(f"a turn of {tokens} tokens, its prompt included, and {records} records of their experts")

    @classmethod
    def of(
        cls,
        prompt_ids: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        log_probs: npt.ArrayLike,
        versions: npt.ArrayLike,
        finish_reason: FinishReason,
        routed_experts: Values = (),
        cached_tokens: int | None = None,
    ) -> "Turn":
        """Build from sequences of numbers. Arrays of the right dtype are not copied; many versions become runs."""
        known = np.asarray(versions, dtype=np.int32)
        return cls(
            np.asarray(prompt_ids, dtype=np.int32),
            np.asarray(token_ids, dtype=np.int32),
            np.asarray(log_probs, dtype=np.float32),
            run_length_encoded(known) if len(known) >= _RUN_LENGTH_FROM_TOKENS else known,
            finish_reason,
            routed_experts=routed_experts,
            cached_tokens=cached_tokens,
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Turn)
            and self.finish_reason == other.finish_reason
            and bool(self.routed_experts) == bool(other.routed_experts)
            and all(map(np.array_equal, self._arrays(), other._arrays()))
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling short arrays as bytes takes a tenth of the time, and a step has thousands. Not the prompt, which many
        # turns share.
        sampled = map(_sent, (self.token_ids, self.log_probs, self.versions))
        text, experts = _sent_text(self.text), self.routed_experts
        return _turn, (self.prompt_ids, *sampled, self.finish_reason, text, experts, self.cached_tokens)

    def _arrays(self) -> tuple[Array, ...]:
        of_tokens = (self.prompt_ids, self.token_ids, self.log_probs, self.versions)
        return *map(fetch, of_tokens), *([fetch_concatenated([self.routed_experts])] if self.routed_experts else [])


def _sent(values: Stretch) -> Stretch | bytes:
    return values.tobytes() if isinstance(values, np.ndarray) and is_copied(values) else values


def _sent_text(text: str | None) -> str | Array | None:
    """Return a long text as an array of its bytes, which is sent without a copy; pickling a string copies it twice."""
    if text is None or len(text) < _LONG_TEXT:
        return text
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _turn(
    prompt_ids: Any,
    token_ids: Any,
    log_probs: Any,
    versions: Any,
    finish_reason: FinishReason,
    text: Any,
    experts: Any,
    cached_tokens: int | None,
) -> Turn:
    return Turn(
        prompt_ids,
        _received(token_ids, np.int32),
        _received(log_probs, np.float32),
        _received(versions, np.int32),
        finish_reason,
        str(text.data, "utf-8", "surrogatepass") if isinstance(text, np.ndarray) else text,
        experts,
        cached_tokens,
    )


def _received(values: Any, dtype: npt.DTypeLike) -> Any:
    return np.frombuffer(values, dtype) if isinstance(values, bytes) else values


@dataclass(frozen=True)
class Trajectory:
    """One conversation with the policy, from the prompt to its end. A single response is one turn.

    `score` is the reward; None before it is computed, or if scoring failed, in which case `failure` is the reason. A
    sample that timed out has both with `reward.on_timeout=zero`, which scores it 0.

    Example: Trajectory((Turn.of([5, 9], [40, 2], [-0.7, -0.1], [3, 3], "stop"),), end="stop", score=Score(1.0))
    """

    turns: Sequence[Turn]
    end: FinishReason
    score: Score | None = None
    failure: Failure | None = None

    @property
    def length(self) -> int:
        """T: the tokens of the whole conversation."""
        return sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in self.turns)

    @property
    def token_ids(self) -> Values:
        """int32, T: the whole conversation, prompts and sampled tokens."""
        return tuple(part for turn in self.turns for part in (turn.prompt_ids, turn.token_ids))

    @property
    def response_ids(self) -> IntArray:
        """int32[R]: all tokens after the first prompt, fetched."""
        return fetch_concatenated([self.token_ids[1:]])

    @property
    def is_sampled(self) -> RunLengthArray:
        """bool, T: whether the policy sampled the token."""
        lengths = [len(part) for turn in self.turns for part in (turn.prompt_ids, turn.token_ids)]
        return RunLengthArray(np.array([False, True] * len(self.turns)), np.array(lengths, dtype=np.int32))

    @property
    def log_probs(self) -> Values:
        """float32, T: the engine's log-probs of the sampled tokens, 0 elsewhere."""
        return tuple(
            part for turn in self.turns for part in (constant(np.float32(0), len(turn.prompt_ids)), turn.log_probs)
        )

    @property
    def versions(self) -> Values:
        """int32, S: for each sampled token, the version of the weights that sampled it."""
        return tuple(turn.versions for turn in self.turns)

    @property
    def routed_experts(self) -> Values:
        """Records of the experts of all T tokens; empty unless the engine returned them with every turn."""
        of_turns = [turn.routed_experts for turn in self.turns]
        return tuple(part for each in of_turns for part in each) if all(of_turns) else ()

    @property
    def sampled_tokens(self) -> int:
        """S: the number of tokens that the policy sampled."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def is_truncated(self) -> bool:
        """Whether the conversation ended at a length limit."""
        return self.end == "length"

    @property
    def scored(self) -> Score:
        """The score. Raises ValueError if there is none."""
        if self.score is None:
            raise ValueError("a trajectory without a score is asked for it")
        return self.score

    @property
    def reward(self) -> float:
        """The score's value."""
        return self.scored.value


@dataclass(frozen=True)
class PromptGroup:
    """One drawn prompt with its samples, which are compared with each other; before the rollout there are none.

    `ordinal` numbers the draws of a run from 0, so the same prompt in two epochs makes two groups; groups of an
    evaluation have negative ordinals. `baseline` is the greedy response to the prompt, if the algorithm needs one.

    Example: PromptGroup(Prompt(17, "gsm8k", [5, 9], "4", {}), ordinal=4096, trajectories=[])
    """

    prompt: Prompt
    ordinal: int
    trajectories: Sequence[Trajectory] = ()
    baseline: Trajectory | None = None

    @property
    def members(self) -> list[Trajectory]:
        """All samples: the trajectories, then the baseline if there is one."""
        return [*self.trajectories, *([self.baseline] if self.baseline is not None else [])]

    @property
    def rewards(self) -> list[float]:
        """Reward of each trajectory. Raises ValueError if one has no score."""
        return [each.reward for each in self.trajectories]

    def only_scored(self) -> "PromptGroup":
        """Keep only trajectories with a score; none if there is a baseline and it has no score to compare with."""
        comparable = self.baseline is None or self.baseline.score is not None
        return self.with_members([each for each in self.trajectories if comparable and each.score is not None])

    def with_members(self, trajectories: Sequence[Trajectory], baseline: Trajectory | None = None) -> "PromptGroup":
        """Replace the trajectories, and the baseline if one is given."""
        return replace(self, trajectories=trajectories, baseline=baseline or self.baseline)


def trajectories_of(groups: Iterable[PromptGroup]) -> list[Trajectory]:
    """The trajectories of all groups, group by group: the order of a batch."""
    return [each for group in groups for each in group.trajectories]


def prompt_of_each(groups: Iterable[PromptGroup]) -> list[Prompt]:
    """The prompt of each trajectory, in the order of a batch."""
    return [group.prompt for group in groups for _ in group.trajectories]
