"""An advantage estimator: what it is given, where a run has that from, and what it asks for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.parts import Option, options_of
from megarl.algorithms.ragged import Ragged


@dataclass(frozen=True)
class ScoredResponses:
    """N responses of T trained tokens, with all that is known of them; an estimator names the fields it needs.

    Example: ScoredResponses(Ragged(torch.tensor([2, 1])), groups=torch.tensor([0, 0]), rewards=torch.tensor([1.0, 0]))
    """

    responses: Ragged
    groups: Tensor
    """long[N]: responses to the same prompt share one; any integers, in any order."""
    rewards: Tensor
    """float[N]: the whole reward of a response; it falls due at its last trained token."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """float[N] each: the weighted, named rewards that `rewards` is the sum of, but for `penalties`."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """The weights that are in `parts`; 1 without."""
    penalties: Tensor | None = None
    """float[N]: what is in `rewards` beside the parts, and has a scale of its own: that of long responses."""
    token_rewards: Tensor | None = None
    """float[T]: rewards of single tokens, beyond `rewards`: the KL penalty, shaping."""
    values: Tensor | None = None
    """float[T]: the critic's value before each token."""
    baseline_rewards: Tensor | None = None
    """float[N]: the reward of the greedy response to the same prompt."""
    old_log_probs: Tensor | None = None
    """float[T]: of the policy before the update."""
    probability_squares: Tensor | None = None
    """float[T]: the sum of the squared probabilities of the whole vocabulary."""
    importance_weights: Tensor | None = None
    """float[T]: of the correction for the sampler's log-probs."""
    process_rewards: Tensor | None = None
    """float[T]: implicit process rewards, their beta already in."""
    teacher_log_probs: Tensor | None = None
    """float[T]: of the sampled tokens under the teacher."""

    @cached_property
    def scores(self) -> Tensor:
        """float64[N]: the reward of a response and of all its tokens together."""
        scores = self.rewards.double()
        return scores if self.token_rewards is None else scores + self.responses.sum(self.token_rewards)

    @cached_property
    def prompts(self) -> Groups:
        """The responses by prompt."""
        return Groups.of(self.groups)


class Source(Enum):
    """Where a run has a field of `ScoredResponses` from: something that it may not have."""

    CRITIC = "the values of a critic"
    GREEDY_RESPONSES = "the rewards of greedy responses"
    NAMED_REWARDS = "several named rewards (reward.functions)"
    IMPLICIT_REWARD_MODEL = "an implicit reward model (reward_model.path)"
    TEACHERS = "the log-probs of a teacher (teachers)"
    OLD_POLICY = "predictions of the policy before the update"


class Input(NamedTuple):
    """One field of `ScoredResponses` whose values are checked before an estimator reads them.

    Example: Input("value", per_token=True, source=Source.CRITIC, batch_field="old_values")
    """

    word: str
    """Name of one value in a message."""
    per_token: bool = False
    source: Source | None = None
    """None: every run has it, or nothing needs it."""
    batch_field: str | None = None
    """The field of the step's batch that it is, at the trained tokens."""


INPUTS: Mapping[str, Input] = {
    "rewards": Input("reward"),
    "baseline_rewards": Input("reward of the greedy response", source=Source.GREEDY_RESPONSES),
    "parts": Input("reward", source=Source.NAMED_REWARDS),
    "token_rewards": Input("reward", per_token=True),
    "values": Input("value", per_token=True, source=Source.CRITIC, batch_field="old_values"),
    "old_log_probs": Input("log-prob", per_token=True, source=Source.OLD_POLICY, batch_field="old_log_probs"),
    "probability_squares": Input(
        "sum of squared probabilities", per_token=True, source=Source.OLD_POLICY, batch_field="probability_squares"
    ),
    "importance_weights": Input("importance weight", per_token=True),
    "process_rewards": Input(
        "process reward", per_token=True, source=Source.IMPLICIT_REWARD_MODEL, batch_field="process_rewards"
    ),
    "teacher_log_probs": Input(
        "teacher's log-prob", per_token=True, source=Source.TEACHERS, batch_field="teacher_log_probs"
    ),
}
"""By field, in the order in which they are checked."""


@dataclass(frozen=True)
class Estimator:
    """A way to estimate advantages."""

    function: Callable[..., Tensor]
    """Maps ScoredResponses to advantages float[T], new, or float[N]; its options are keyword-only, with defaults."""
    needs: frozenset[str] = frozenset()
    """The optional fields of ScoredResponses that it cannot do without: keys of `INPUTS`."""
    smallest_group: int = 1
    """Responses to each prompt at least: 2 where they are compared with each other."""
    reads_kl: bool = True
    """Whether `token_rewards`, in which a KL may be, change the advantages."""
    of_response: bool = False
    """Whether it gives each response one advantage for all of its tokens, float[N]."""
    whitened: bool = False
    """Whether its advantages of tokens are brought to mean 0 and variance 1 over the tokens of the batch afterwards."""

    @property
    def options(self) -> Mapping[str, Option]:
        """Its options, by name."""
        return options_of(self.function)

    @property
    def sources(self) -> frozenset[Source]:
        """Everything that a run must have for it."""
        return frozenset(source for name in self.needs if (source := INPUTS[name].source))


def given(values: Tensor | None) -> Tensor:
    """A field that an estimator names among its needs, and so has."""
    assert values is not None, "a field that the estimator does not name among its needs"
    return values
