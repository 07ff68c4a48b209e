"""Advantages from the rewards that are still to come at each token."""

import torch
from torch import Tensor

from megarl.algorithms.parts import ZeroToOne
from megarl.algorithms.ragged import Ragged, empty
from megarl.algorithms.recurrence import suffix_sums


def returns_to_go(rewards: Tensor, responses: Ragged, token_rewards: Tensor | None, gamma: float = 1.0) -> Tensor:
    """R_t = sum_(k >= t) gamma^(k-t) r_k within each response: [T], new; the reward of a response is its last token's.

    Tokens that are not trained on do not discount: neither does the time that a tool takes.
    """
    if gamma == 1 and token_rewards is None:
        return responses.spread(rewards)

    def of_tokens(tokens: slice) -> Tensor:
        """Rewards of some tokens, in new memory: their own, and those of the responses whose last token they are."""
        count = tokens.stop - tokens.start
        own = rewards.new_zeros(count) if token_rewards is None else token_rewards[tokens].clone()
        return responses.add_at_last_token_(own, rewards, tokens.start)

    return suffix_sums(of_tokens, responses, gamma)


def reinforce_plus_plus(
    rewards: Tensor, responses: Ragged, token_rewards: Tensor | None = None, *, gamma: ZeroToOne = 1.0
) -> Tensor:
    """Returns, then whitened over the batch, without groups (REINFORCE++, arXiv:2501.03262, section 3)."""
    return returns_to_go(rewards, responses, token_rewards, gamma)


def remax(rewards: Tensor, baseline_rewards: Tensor, responses: Ragged, token_rewards: Tensor | None = None) -> Tensor:
    """Returns less the reward of the greedy response to the same prompt (ReMax, arXiv:2310.10505, algorithm 1).

    Without discount, this is what is left to come if the baseline is taken from the reward of the last token.
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
    """Generalised advantage estimation from the values of a critic, then whitened over the batch.

    d_t = r_t + gamma V_(t+1) - V_t with V = 0 after the last token, A_t = d_t + gamma lambda A_(t+1)
    (arXiv:1506.02438, equations 11 and 16). Over tokens that are not trained on, the next value and advantage are those
    of the next token that is.
    """
    last = responses.last_tokens
    # The negative of the errors, since that is one pass over memory: V_t - gamma V_(t+1) - r_t.
    errors = empty(len(values), values)
    torch.sub(values[:-1], values[1:], alpha=gamma, out=errors[:-1])
    errors[last] = values[last] - rewards[responses.lengths > 0]
    if token_rewards is not None:
        errors -= token_rewards
    return suffix_sums(errors, responses, gamma * gae_lambda).neg_()
