"""Input and output of advantage estimators: scored responses, and advantages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.ragged import Ragged


@dataclass(frozen=True)
class Advantages:
    """How much better each token was than expected.

    Example: Advantages(torch.tensor([0.5, 0.5, -0.5]))
    """

    advantages: Tensor
    """float[T]"""
    returns: Tensor | None = None
    """float[T]: what a critic learns; of estimators with a critic alone."""


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

    def same_for_all_tokens(self, advantages: Tensor) -> Advantages:
        """The advantage of a response [N] at every one of its tokens."""
        return Advantages(self.responses.spread(advantages.to(self.rewards.dtype)))


def given(values: Tensor | None) -> Tensor:
    """A field that an estimator names among its needs, and so has."""
    assert values is not None, "a field that the estimator does not name among its needs"
    return values
