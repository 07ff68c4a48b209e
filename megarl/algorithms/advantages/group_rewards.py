"""Advantages from the scores of the responses to one prompt: the same at every token of a response."""

import torch
from torch import Tensor

from converters.errors import UserError
from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.ragged import Ragged

# Keeps the advantages of a group finite when its rewards are equal; verl's value.
STD_EPSILON = 1e-6


def standardised(values: Tensor, groups: Groups, *, normalize_by_std: bool) -> Tensor:
    """Subtract the mean of the group from values [N]; with `normalize_by_std` also divide by its std + 1e-6."""
    centred = groups.centred(values)
    return centred / (groups.spread(groups.std(values)) + STD_EPSILON) if normalize_by_std else centred


def grpo(scores: Tensor, prompts: Groups, *, normalize_by_std: bool = True) -> Tensor:
    """Scores normalized within their group.

    A_i = (r_i - mean_g) / (std_g + 1e-6), mean and unbiased standard deviation (n - 1) over the group g of response
    i (DeepSeekMath, arXiv:2402.03300, section 4.1.2). Without `normalize_by_std` A_i = r_i - mean_g, as in Dr. GRPO
    (arXiv:2503.20783). In a group of one, verl uses the bare score; here such a group is refused.
    """
    return standardised(scores, prompts, normalize_by_std=normalize_by_std)


def rloo(scores: Tensor, prompts: Groups) -> Tensor:
    """Scores minus the mean score of the other responses to the same prompt.

    A_i = r_i - sum_(j != i) r_j / (n - 1) (REINFORCE leave-one-out, arXiv:2402.14740, section 2.3), which is
    n / (n - 1) times r_i - mean_g. verl has two forms, which differ in a group of one; here such a group is refused.
    """
    return leave_one_out(scores, prompts)


def leave_one_out(values: Tensor, groups: Groups) -> Tensor:
    """Subtract from each of values [N] the mean of the others in its group."""
    return groups.centred(values) * groups.spread(groups.sizes / (groups.sizes - 1))


def opo(scores: Tensor, prompts: Groups, responses: Ragged) -> Tensor:
    """Scores minus the variance-minimizing baseline, if the squared gradient of a response grows with its length.

    A_i = r_i - sum_j l_j r_j / sum_j l_j over the group, l the lengths in trained tokens (OPO, arXiv:2505.23585).
    A response without trained tokens does not enter the baseline.
    """
    lengths = responses.lengths.double()
    baselines = prompts.sum(lengths * scores) / prompts.sum(lengths).clamp(min=1)
    return scores - prompts.spread(baselines)


def gpg(scores: Tensor, prompts: Groups) -> Tensor:
    """Scores minus their group's mean, scaled up to make up for groups without a gradient.

    A_i = alpha (r_i - mean_g) with alpha = N / (N - M). M counts the responses in groups of equal scores, which have no
    gradient but do count in the batch (GPG, arXiv:2504.02546, with F_norm = 1). This follows the paper; verl's M counts
    the responses with score 0, which have a gradient like any other. If the scores are equal in every group, all
    advantages are 0.
    """
    centred = prompts.centred(scores)
    teaching = prompts.sum(centred.abs()) > 0
    alpha = len(centred) / prompts.sizes[teaching].sum().clamp(min=1)
    return alpha * centred


def max_rl(scores: Tensor, prompts: Groups) -> Tensor:
    """Scores relative to their group's mean: maximizes the log of the expected score instead of the score.

    A_i = (r_i - mean_g) / mean_g (MaxRL, arXiv:2602.02710). With rewards 0 and 1, a prompt with pass rate p is weighted
    by 1 / p. A group whose mean is 0 has no success to learn from: its advantages are 0.

    Raises UserError for a negative score, since the log of its expectation need not exist.
    """
    if bool((scores < 0).any()):
        raise UserError(
            f"algorithm.advantage=max_rl needs rewards of at least 0, but there is one of {float(scores.min())}"
            ": use rewards from 0 to 1, and algorithm.kl_in=loss"
        )
    means = prompts.spread(prompts.mean(scores))
    return torch.where(means > 0, prompts.centred(scores) / means, 0.0)
