"""Advantages from the ranking of the responses to one prompt."""

import torch
from torch import Tensor

from megarl.algorithms.advantages.group_rewards import STD_EPSILON
from megarl.algorithms.advantages.groups import Groups


def grpo_pass_k(scores: Tensor, prompts: Groups, *, normalize_by_std: bool = True) -> Tensor:
    """Lead of the best response of a group over the second best, 0 for all others: optimizes pass@k.

    A_best = (r_best - r_second) / (std_g + 1e-6) with the unbiased std_g; without `normalize_by_std`
    A_best = r_best - r_second (arXiv:2503.19595, verl's form). A tie for the best makes all advantages of the group 0.
    """
    order = prompts.ranked(scores)
    best = prompts.sizes.cumsum(0) - 1
    leads = scores[order[best]] - scores[order[best - 1]]
    advantages = torch.zeros_like(scores)
    advantages[order[best]] = leads / (prompts.std(scores) + STD_EPSILON) if normalize_by_std else leads
    return advantages


def win_rate(scores: Tensor, prompts: Groups) -> Tensor:
    """Win rate of a response against its group, minus 1/2: from -1/2 to 1/2.

    A_i = sum_j P(y_i beats y_j) / n - 1/2 over the n responses of the group, including i itself. The greater score
    wins; equal scores count 1/2 (SPPO, arXiv:2405.00675, section 4: the win rate against the policy, estimated from its
    n samples).
    """
    order = prompts.ranked(scores)
    ranked, of_group = scores[order], prompts.index[order]
    differs = (ranked[1:] != ranked[:-1]) | (of_group[1:] != of_group[:-1])
    level = torch.cat([differs.new_zeros(1), differs]).cumsum(0)
    alike = level.bincount()
    below = (alike.cumsum(0) - alike)[level] - prompts.starts[of_group]
    wins = torch.zeros_like(scores)
    wins[order] = (below + 0.5 * alike[level]).double() / prompts.sizes[of_group]
    return wins - 0.5
