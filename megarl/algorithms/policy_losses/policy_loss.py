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
"""Possible inputs of a ratio, a surrogate or a selection, which reads one by naming it as a parameter."""

_OF_SELECTION = {**INPUTS, "generator": "torch.Generator: seeded by the step"}
_OF_SURROGATE = {**INPUTS, "log_ratio": "float[T]: of the ratio", "chosen": "bool[T]: by the selection, where one is"}


@dataclass(frozen=True)
class TokenLoss:
    """Loss per token [T], differentiable, and metrics per token [T] by name."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A ratio and a surrogate. The aggregation is applied later, as weights on the tokens.

    Raises TypeError for a function with an unknown input.
    """

    ratio: Callable[..., Tensor]
    """From `INPUTS` to the log-ratio of every token [T]."""
    surrogate: Callable[..., TokenLoss]
    """From `INPUTS`, `log_ratio` and `chosen` to the loss of every token. Options are keyword-only, with defaults."""
    of_response: bool = False
    """Whether all tokens of a response share one ratio: the loss is then defined as the mean over responses of the mean
    over their tokens."""
    acts_on_policy: bool = False
    """Whether the gradient differs from the policy gradient even while all ratios are 1."""
    clips_upward: bool = False
    """Whether a token with a positive advantage has no gradient once its ratio exceeds the option `clip_high`."""
    selection: Callable[..., Tensor] | None = None
    """From `INPUTS` and `generator` to bool[T]: the tokens that the loss treats differently, which the surrogate reads
    as `chosen`. It is called once with all trained tokens of an optimizer step, before the batch is split."""

    def __post_init__(self) -> None:
        check_inputs(self.ratio, INPUTS)
        check_inputs(self.surrogate, _OF_SURROGATE)
        if self.selection is not None:
            check_inputs(self.selection, _OF_SELECTION)

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> TokenLoss:
        """Compute the loss of every token; ratio and surrogate get the `inputs` and `options` that they name."""
        log_ratio = call(self.ratio, inputs)
        return call(self.surrogate, {**inputs, "log_ratio": log_ratio}, **_of(self.surrogate, options))

    def select(self, inputs: Mapping[str, Any], generator: torch.Generator, options: Mapping[str, Any]) -> Tensor:
        """Run the selection, which gets the `inputs` and `options` that it names: bool[T]."""
        assert self.selection is not None, "a loss without a selection"
        return call(self.selection, {**inputs, "generator": generator}, **_of(self.selection, options))

    @property
    def has_ratio(self) -> bool:
        """Whether the loss compares the policy with another one, instead of assuming it sampled the tokens."""
        return bool({"old_log_probs", "reference_log_probs"} & inputs_of(self.ratio, self.surrogate).keys())

    @property
    def has_ratio_to_sampler(self) -> bool:
        """Whether its ratio is to the engine's policy with `ratio_to=rollout`, and so corrects for staleness."""
        return "old_log_probs" in inputs_of(self.ratio, self.surrogate)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's log-probs."""
        return "reference_log_probs" in inputs_of(self.ratio, self.surrogate)

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """The options of the surrogate and of the selection, by name."""
        return options_of(self.surrogate, *([self.selection] if self.selection else []))


def _of(function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
    """The `options` that `function` names."""
    names = options_of(function)
    return {name: value for name, value in options.items() if name in names}
