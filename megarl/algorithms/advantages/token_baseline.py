"""Advantages with the baseline of least variance at every token."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.advantages.returns import returns_to_go
from megarl.algorithms.advantages.scored import Advantages, ScoredResponses, given
from megarl.algorithms.memory import empty
from megarl.algorithms.recurrence import prefix_sums

# Keeps the baseline finite where no token of the group was in doubt; verl's value.
_WEIGHT_EPSILON = 1e-8


def optimal_token_baseline(scored: ScoredResponses) -> Advantages:
    """Returns less, at every token, the group's mean of the returns there, weighted by the gradients so far.

    A_it = G_it - B_t, B_t = sum_j G_jt W_jt / (sum_j W_jt + 1e-8) over the responses of the group that have a t-th
    trained token, W_jt = sum_(k <= t) w_jk, w = rho^2 (1 - 2 pi + sum_v pi_v^2), which is the squared gradient of
    log pi with respect to the logits; rho are the importance weights of the sampler's correction, if there are any,
    and G returns-to-go. Where only one response is that long, B_t = 0, so a group of one is plain REINFORCE.
    This is verl's optimal token baseline (docs/algo/otb.md), in its multi-turn form: t counts the trained tokens, so
    that over single turns both are the same, and tools' outputs shift nothing over several.
    """
    responses, lengths = scored.responses, scored.responses.lengths.tolist()
    alike = scored.token_rewards is None
    returns = scored.rewards.unbind() if alike else returns_to_go(scored).split(lengths)
    weights = prefix_sums(_gradient_squares(scored), responses)
    of_weights = weights.split(lengths)
    by_length = scored.prompts.ranked(responses.lengths).split(scored.prompts.sizes.tolist())
    for group in by_length:
        members = [_Member(lengths[i], returns[i], of_weights[i]) for i in group.tolist()]
        baseline = _baseline(members)
        for member in members:
            # The weights are not read again: they make room for the advantages.
            torch.sub(member.returns, baseline[: member.length], out=member.weights)
    return Advantages(weights)


class _Member(NamedTuple):
    """A response of a group."""

    length: int
    returns: Tensor
    """float[length], or [] if the same at every token."""
    weights: Tensor
    """float[length]"""


def _gradient_squares(scored: ScoredResponses) -> Tensor:
    log_probs = given(scored.old_log_probs)
    squares = torch.exp(log_probs, out=empty(len(log_probs), log_probs))
    torch.sub(given(scored.probability_squares), squares, alpha=2, out=squares).add_(1)
    if scored.importance_weights is not None:
        squares.mul_(scored.importance_weights).mul_(scored.importance_weights)
    return squares


def _baseline(members: Sequence[_Member]) -> Tensor:
    """Of one group, from its shortest to its longest response: [the longest]."""
    numerator, denominator = members[-1].weights.new_zeros(2, members[-1].length)
    for length, returns, weights in members:
        numerator[:length].addcmul_(weights, returns)
        denominator[:length].add_(weights)
    second = members[-2].length if len(members) > 1 else 0
    numerator[second:] = 0
    return numerator.div_(denominator.add_(_WEIGHT_EPSILON))
