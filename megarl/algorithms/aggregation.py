"""Aggregations: the weight of every trained token in the loss of the global batch.

The loss of an optimizer step is the sum of weight x loss over all tokens of all micro-batches on all ranks. The weights
contain the denominators of the whole step, so the loss does not depend on how the work is split. A response without a
trained token does not count in any denominator. (verl leaves such responses out of its own denominators too, but counts
them if the caller gives the size of the global batch.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.parts import AtLeastOne, Option, options_of
from megarl.algorithms.ragged import Ragged


@dataclass(frozen=True)
class Aggregation:
    """Maps the lengths in trained tokens [N] of an optimizer step's responses to the weights of these tokens.

    All tokens of a response have the same weight.
    """

    function: Callable[..., Tensor]
    """(lengths[N], *, options) to weights float64[N], or a scalar for all; with `by_prompt` (lengths, groups[N], ...).

    The weight of a response without a trained token is ignored.
    """
    by_prompt: bool = False

    def __call__(
        self, lengths: Tensor, groups: Tensor | None = None, options: Mapping[str, Any] | None = None
    ) -> Tensor:
        """float32[sum(lengths)]: the weight of each token, response by response. See `of_responses`."""
        return Ragged(lengths).spread(self.of_responses(lengths, groups, options))

    def of_responses(
        self, lengths: Tensor, groups: Tensor | None = None, options: Mapping[str, Any] | None = None
    ) -> Tensor:
        """float32[N]: the weight of each token of a response, 0 for a response without tokens.

        `groups` long[N] holds any integers that are equal for responses to the same prompt. Raises UserError if no
        response has a token.
        """
        if not bool(lengths.any()):
            raise UserError(
                "no response of this step has a token to train on: check the rollout and the reward function"
            )
        if self.by_prompt:
            assert groups is not None, "the groups of the responses have to be given"
            weights = self.function(lengths, groups, **(options or {}))
        else:
            weights = self.function(lengths, **(options or {}))
        return weights.expand(len(lengths)).float().masked_fill(lengths == 0, 0)

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """Options of the function, by name."""
        return options_of(self.function)


def token_mean(lengths: Tensor) -> Tensor:
    """1 / sum(lengths): the mean over all tokens, as in DAPO's code. The weights sum to 1.

    Equation 8 of DAPO's paper takes this mean within each prompt, and averages over prompts: `prompt_mean`.
    """
    return 1 / lengths.sum().double()


def token_sum(lengths: Tensor) -> Tensor:
    """1 for every token: the gradient grows with the batch."""
    return torch.ones((), dtype=torch.float64, device=lengths.device)


def seq_mean_token_sum(lengths: Tensor) -> Tensor:
    """1 / N: the mean over the responses of the sum over their tokens (REINFORCE on whole responses)."""
    return 1 / _responses(lengths)


def seq_mean_token_mean(lengths: Tensor) -> Tensor:
    """1 / (N length_i): the mean over the responses of the mean over their tokens. The weights sum to 1.

    GRPO (arXiv:2402.03300, equation 3). Losses with one ratio per response (gspo, gmpo, sppo) are defined with it.
    """
    return 1 / (_responses(lengths) * lengths.double())


def prompt_mean(lengths: Tensor, groups: Tensor) -> Tensor:
    """1 / (P L_p): the mean over the P prompts of the mean over the L_p tokens of all their responses.

    DAPO (arXiv:2503.14476, equation 8), ScaleRL's prompt average (arXiv:2510.13786): a prompt with long responses
    counts as much as one with short ones. A prompt without a trained token is not counted in P. The weights sum to 1.
    """
    of_prompt = Groups.of(groups)
    tokens = of_prompt.sum(lengths.double())
    prompts = (tokens > 0).sum()
    return 1 / (prompts * of_prompt.spread(tokens))


def seq_mean_token_sum_norm(lengths: Tensor, *, length: AtLeastOne | None = None) -> Tensor:
    """1 / (N length): the mean over the responses of the sum over tokens, divided by a constant length.

    Dr. GRPO (arXiv:2503.20783, section 3.2): a constant favors no length. Raises UserError without `length`, or if it
    is below 1.
    """
    if length is None or length < 1:
        raise UserError(
            "algorithm.aggregation=seq_mean_token_sum_norm divides by a constant length, but algorithm."
            f"aggregation_options.length is {length}: set it to at least 1, usually rollout.max_response_tokens"
        )
    return seq_mean_token_sum(lengths) / length


def _responses(lengths: Tensor) -> Tensor:
    return (lengths > 0).sum().double()


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": Aggregation(token_mean),
    "token_sum": Aggregation(token_sum),
    "prompt_mean": Aggregation(prompt_mean, by_prompt=True),
    "seq_mean_token_sum": Aggregation(seq_mean_token_sum),
    "seq_mean_token_mean": Aggregation(seq_mean_token_mean),
    "seq_mean_token_sum_norm": Aggregation(seq_mean_token_sum_norm),
}
