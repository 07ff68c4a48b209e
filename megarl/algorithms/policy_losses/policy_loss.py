"""A policy loss: a log-ratio of two policies, and a surrogate of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.parts import Option, options_of
from megarl.algorithms.ragged import Ragged


@dataclass(frozen=True)
class Tokens:
    """Input of a policy loss: the T trained tokens of N responses, end to end. All but `log_probs` are constants.

    Example: Tokens(torch.zeros(3), torch.zeros(3), torch.tensor([0.5, 0.5, -0.5]), Ragged(torch.tensor([2, 1])))
    """

    log_probs: Tensor
    """[T]: under the policy, differentiable."""
    old_log_probs: Tensor
    """[T]: under the policy that ratios are to: before the step's first update, or as the engine sampled."""
    advantages: Tensor
    """[T]"""
    ragged: Ragged
    reference_log_probs: Tensor | None = None
    """[T]: under the reference, for the losses with `needs_reference`."""
    chosen: Tensor | None = None
    """bool[T]: what the loss's selection chose, for the losses with one."""


@dataclass(frozen=True)
class TokenLoss:
    """A loss of every token [T], differentiable, and what there is to say about every token [T], by name."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A ratio and a surrogate; the aggregation follows, as weights on the tokens."""

    ratio: Callable[[Tokens], Tensor]
    """The log-ratio of every token [T]."""
    surrogate: Callable[..., TokenLoss]
    """(log_ratio[T], tokens, *, options) -> TokenLoss; the options are keyword-only, with defaults."""
    of_response: bool = False
    """There is one ratio for all tokens of a response: the loss is defined for the mean over responses of the mean
    over their tokens."""
    has_ratio: bool = True
    """False for a loss that takes every token for one of the present policy's own."""
    acts_on_policy: bool = False
    """It differs from the policy gradient where the policy is still the one that ratios are to."""
    needs_reference: bool = False
    """It reads `reference_log_probs`."""
    selection: Callable[..., Tensor] | None = None
    """(tokens, generator, *, options) -> bool[T]: which of all the trained tokens of an optimizer step the loss treats
    apart; it then reads `chosen`. It sees the whole batch, and is made once, before the batch is cut."""

    def __call__(self, tokens: Tokens, options: Mapping[str, Any]) -> TokenLoss:
        """The loss of every token, with the `options` that the surrogate names."""
        return self.surrogate(self.ratio(tokens), tokens, **_of(self.surrogate, options))

    def select(self, tokens: Tokens, generator: torch.Generator, options: Mapping[str, Any]) -> Tensor:
        """Tokens that `selection` chooses, with the `options` that it names."""
        assert self.selection is not None, "a loss without a selection"
        return self.selection(tokens, generator, **_of(self.selection, options))

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """The options of the surrogate and of the selection, by name."""
        return options_of(self.surrogate, *([self.selection] if self.selection else []))


def _of(function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
    """The `options` that `function` names."""
    names = options_of(function)
    return {name: value for name, value in options.items() if name in names}
