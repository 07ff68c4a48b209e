"""Advantages with the baseline of least variance at every token."""

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
    responses = scored.responses
    returns = scored.rewards if scored.token_rewards is None else returns_to_go(scored)
    weights = prefix_sums(_gradient_squares(scored), responses)
    lengths = responses.lengths.tolist()
    of_weights = weights.split(lengths)
    of_returns = returns.unbind() if scored.token_rewards is None else returns.split(lengths)
    members = scored.prompts.ranked(responses.lengths).split(scored.prompts.sizes.tolist())
    for group in (each.tolist() for each in members):
        baseline = _baseline([of_returns[i] for i in group], [of_weights[i] for i in group])
        for i in group:
            torch.sub(of_returns[i], baseline[: lengths[i]], out=of_weights[i])
    return Advantages(weights)


def _gradient_squares(scored: ScoredResponses) -> Tensor:
    log_probs = given(scored.old_log_probs)
    squares = torch.exp(log_probs, out=empty(len(log_probs), log_probs))
    torch.sub(given(scored.probability_squares), squares, alpha=2, out=squares).add_(1)
    if scored.importance_weights is not None:
        squares.mul_(scored.importance_weights).mul_(scored.importance_weights)
    return squares


def _baseline(returns: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Of one group, whose responses are given from the shortest to the longest: [the longest]."""
    numerator, denominator = torch.zeros_like(weights[-1]), torch.zeros_like(weights[-1])
    for each_return, each_weight in zip(returns, weights, strict=True):
        numerator[: len(each_weight)].addcmul_(each_weight, each_return)
        denominator[: len(each_weight)].add_(each_weight)
    second = len(weights[-2]) if len(weights) > 1 else 0
    numerator[second:] = 0
    return numerator.div_(denominator.add_(_WEIGHT_EPSILON))
