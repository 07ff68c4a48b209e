"""Advantages with the variance-minimizing baseline at every token."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.advantages.returns import returns_to_go
from megarl.algorithms.ragged import Ragged
from megarl.algorithms.recurrence import prefix_sums

# Keeps the baseline finite where every token of the group so far had probability 1; verl's value.
_WEIGHT_EPSILON = 1e-8
_LOG2_E = 1 / math.log(2)


def optimal_token_baseline(
    rewards: Tensor,
    old_log_probs: Tensor,
    probability_squares: Tensor,
    prompts: Groups,
    responses: Ragged,
    token_rewards: Tensor | None = None,
    importance_weights: Tensor | None = None,
) -> Tensor:
    """Returns minus, at every token, the group's mean return there, weighted by the squared gradients so far.

    A_it = G_it - B_t, B_t = sum_j G_jt W_jt / (sum_j W_jt + 1e-8) over the responses of the group that have a t-th
    trained token. G are the returns-to-go. W_jt = sum_(k <= t) w_jk with w = rho^2 (1 - 2 pi + sum_v pi_v^2), which for
    rho = 1 is the squared norm of the gradient of log pi with respect to the logits; rho are the importance weights of
    the corrections, 1 without any. Where only one response is that long, B_t = 0, so a group of one is plain REINFORCE.

    This is verl's optimal token baseline (docs/algo/otb.md) in its multi-turn form: t counts trained tokens only, so
    outputs of tools between turns shift nothing. For single turns both forms agree.
    """
    lengths = responses.lengths.tolist()
    squares = partial(_gradient_squares, old_log_probs, probability_squares, importance_weights)
    weights = prefix_sums(squares, responses).split(lengths)
    returns = returns_to_go(rewards, responses, token_rewards)
    of_returns = returns.split(lengths)
    for group in prompts.ranked(responses.lengths).split(prompts.sizes.tolist()):
        _subtract_baseline_([(of_returns[i], weights[i]) for i in group.tolist()])
    return returns


def _gradient_squares(
    old_log_probs: Tensor, probability_squares: Tensor, importance_weights: Tensor | None, tokens: slice
) -> Tensor:
    """w of a slice of the tokens, in new memory."""
    # 2^(x log2 e), since exp takes four times as long; 1 - 2 pi loses no digits by it.
    squares = torch.mul(old_log_probs[tokens], _LOG2_E).exp2_()
    torch.sub(probability_squares[tokens], squares, alpha=2, out=squares).add_(1)
    if importance_weights is not None:
        squares.mul_(importance_weights[tokens]).mul_(importance_weights[tokens])
    return squares


def _subtract_baseline_(members: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Subtract the baseline in place; `members` are returns and weights of a group, each [length], the longest last."""
    longest = members[-1][0]
    baseline, total = torch.zeros_like(longest), torch.full_like(longest, _WEIGHT_EPSILON)
    of_members = [baseline[: len(returns)] for returns, _ in members]
    for (returns, weights), part in zip(members, of_members, strict=True):
        part.addcmul_(returns, weights)
        total[: len(weights)].add_(weights)
    second = len(members[-2][0]) if len(members) > 1 else 0
    baseline.div_(total)[second:] = 0
    for (returns, _), part in zip(members, of_members, strict=True):
        returns.sub_(part)
