"""Advantages from the returns: the rewards still to come at each token."""

import torch
from torch import Tensor

from megarl.algorithms.parts import ZeroToOne
from megarl.algorithms.ragged import Ragged, empty
from megarl.algorithms.recurrence import suffix_sums


def returns_to_go(rewards: Tensor, responses: Ragged, token_rewards: Tensor | None, gamma: float = 1.0) -> Tensor:
    """R_t = sum_(k >= t) gamma^(k-t) r_k within each response: a new [T]; `rewards` [N] fall due at the last token.

    Only trained tokens are discounted over; tokens in between that are not trained on, such as a tool's output, are
    not.
    """
    if gamma == 1 and token_rewards is None:
        return responses.spread(rewards)

    def of_tokens(tokens: slice) -> Tensor:
        """Rewards at a slice of the tokens, in new memory: per-token rewards, plus `rewards` at last tokens."""
        count = tokens.stop - tokens.start
        own = rewards.new_zeros(count) if token_rewards is None else token_rewards[tokens].clone()
        return responses.add_at_last_token_(own, rewards, tokens.start)

    return suffix_sums(of_tokens, responses, gamma)


def reinforce_plus_plus(
    rewards: Tensor, responses: Ragged, token_rewards: Tensor | None = None, *, gamma: ZeroToOne = 1.0
) -> Tensor:
    """Returns, whitened over the batch afterwards; no groups (REINFORCE++, arXiv:2501.03262, section 3)."""
    return returns_to_go(rewards, responses, token_rewards, gamma)


def remax(rewards: Tensor, baseline_rewards: Tensor, responses: Ragged, token_rewards: Tensor | None = None) -> Tensor:
    """Returns minus the reward of the greedy response to the same prompt (ReMax, arXiv:2310.10505, algorithm 1).

    Since nothing is discounted, subtracting the baseline from the reward of the response gives the same.
    """
    return returns_to_go(rewards - baseline_rewards, responses, token_rewards)


def gae(
    values: Tensor,
    rewards: Tensor,
    responses: Ragged,
    token_rewards: Tensor | None = None,
    *,
    gamma: ZeroToOne = 1.0,
    gae_lambda: ZeroToOne = 1.0,
) -> Tensor:
    """Generalized advantage estimation from the values of a critic, whitened over the batch afterwards.

    d_t = r_t + gamma V_(t+1) - V_t with V = 0 after the last token, A_t = d_t + gamma lambda A_(t+1)
    (arXiv:1506.02438, equations 11 and 16). Tokens that are not trained on are skipped: t + 1 is the next trained
    token.
    """
    last = responses.last_tokens
    # The negated errors V_t - gamma V_(t+1) - r_t, since they take one pass over memory.
    errors = empty(len(values), values)
    torch.sub(values[:-1], values[1:], alpha=gamma, out=errors[:-1])
    errors[last] = values[last] - rewards[responses.lengths > 0]
    if token_rewards is not None:
        errors -= token_rewards
    return suffix_sums(errors, responses, gamma * gae_lambda).neg_()
