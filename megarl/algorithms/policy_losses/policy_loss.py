"""A policy loss: a log-ratio of two policies, and a surrogate of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.parts import Option, call, check_inputs, inputs_of, options_of

INPUTS: Mapping[str, str] = {
    "log_probs": "float[T]: under the policy, differentiable; all others are constants",
    "old_log_probs": "float[T]: under the policy that ratios are to: before the step's first update, or as sampled",
    "reference_log_probs": "float[T]: under the reference, which a run keeps for a loss that names it",
    "advantages": "float[T]",
    "responses": "Ragged: how the T trained tokens are those of N responses, end to end",
}
"""Inputs of a ratio, a surrogate and a selection; each names those that it reads as its parameters."""

_OF_SELECTION = {**INPUTS, "generator": "torch.Generator: seeded by the step"}
_OF_SURROGATE = {**INPUTS, "log_ratio": "float[T]: of the ratio", "chosen": "bool[T]: by the selection, where one is"}


@dataclass(frozen=True)
class TokenLoss:
    """A loss of every token [T], differentiable, and its metrics of every token [T], by name."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A ratio and a surrogate; the aggregation follows, as weights on the tokens.

    Raises TypeError for a function with an unknown input.
    """

    ratio: Callable[..., Tensor]
    """The log-ratio of every token [T], from `INPUTS`."""
    surrogate: Callable[..., TokenLoss]
    """The loss of every token, from `INPUTS`, `log_ratio` and `chosen`; its options are keyword-only, with defaults."""
    of_response: bool = False
    """There is one ratio for all tokens of a response: the loss is defined for the mean over responses of the mean
    over their tokens."""
    acts_on_policy: bool = False
    """It differs from the policy gradient where the policy is still the one that ratios are to."""
    clips_upward: bool = False
    """A token has no gradient where its ratio, with an advantage above 0, is beyond the option `clip_high`."""
    selection: Callable[..., Tensor] | None = None
    """bool[T], from `INPUTS` and `generator`: which of all the trained tokens of an optimizer step the loss treats
    apart; the surrogate then reads `chosen`. It sees the whole batch, and is made once, before the batch is cut."""

    def __post_init__(self) -> None:
        check_inputs(self.ratio, INPUTS)
        check_inputs(self.surrogate, _OF_SURROGATE)
        if self.selection is not None:
            check_inputs(self.selection, _OF_SELECTION)

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> TokenLoss:
        """The loss of every token; the two functions get the `inputs` and `options` that their parameters name."""
        log_ratio = call(self.ratio, inputs)
        return call(self.surrogate, {**inputs, "log_ratio": log_ratio}, **_of(self.surrogate, options))

    def select(self, inputs: Mapping[str, Any], generator: torch.Generator, options: Mapping[str, Any]) -> Tensor:
        """Tokens that `selection` chooses; it gets the `inputs` and `options` that its parameters name."""
        assert self.selection is not None, "a loss without a selection"
        return call(self.selection, {**inputs, "generator": generator}, **_of(self.selection, options))

    @property
    def has_ratio(self) -> bool:
        """Whether it compares the policy with another one, not taking every token for one of its own."""
        return bool({"old_log_probs", "reference_log_probs"} & inputs_of(self.ratio, self.surrogate).keys())

    @property
    def has_ratio_to_sampler(self) -> bool:
        """Whether its ratio is to the engine's policy with `ratio_to=rollout`, and so corrects for its age."""
        return "old_log_probs" in inputs_of(self.ratio, self.surrogate)

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the reference's log-probs."""
        return "reference_log_probs" in inputs_of(self.ratio, self.surrogate)

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """The options of the surrogate and of the selection, by name."""
        return options_of(self.surrogate, *([self.selection] if self.selection else []))


def _of(function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
    """The `options` that `function` names."""
    names = options_of(function)
    return {name: value for name, value in options.items() if name in names}
