"""Advantages from group statistics that are then whitened over the batch."""

import torch

from megarl.algorithms.advantages.group_rewards import standardised
from megarl.algorithms.advantages.scored import Advantages, ScoredResponses
from megarl.algorithms.advantages.whitening import whitened_by_token


def reinforce_plus_plus_baseline(scored: ScoredResponses) -> Advantages:
    """Scores less their group's mean, whitened over the tokens of the batch.

    A_i = (r_i - mean_g - m) / sqrt(v + 1e-8), m and v mean and variance of r_i - mean_g over all trained tokens
    (REINFORCE++ with baseline, arXiv:2501.03262, section 3.2).
    """
    return scored.same_for_all_tokens(whitened_by_token(scored.prompts.centred(scored.scores), scored.responses))


def gdpo(scored: ScoredResponses, *, normalize_by_std: bool = True) -> Advantages:
    """Several rewards, each normalised within its group by itself, so that none drowns the others.

    A_i = whiten(sum_k w_k (r_ik - mean_gk) / (std_gk + 1e-6) + q_i - mean_gq) over the named rewards k with the weights
    w, whitened over the tokens of the batch; without `normalize_by_std` not divided (GDPO, arXiv:2601.05242). The
    normalisation would divide a weight out, so it is taken out of the part before and put in after. A penalty q of long
    responses is no reward of its own: divided by its deviation it would count the same whatever its factor, and in full
    for one token too many; it is centred alone. Rewards of single tokens belong to no part and change nothing.

    The whitening over tokens is verl's; the paper's is over responses, where long ones weigh no more than short ones.
    """
    total = torch.zeros_like(scored.scores)
    for name, part in scored.parts.items():
        weight = scored.part_weights.get(name, 1.0)
        if weight:
            bare = part.double() / weight
            total += weight * standardised(bare, scored.prompts, normalize_by_std=normalize_by_std)
    if scored.penalties is not None:
        total += scored.prompts.centred(scored.penalties.double())
    return scored.same_for_all_tokens(whitened_by_token(total, scored.responses))
