"""Advantages from the rewards of the responses to one prompt: the same at every token of a response."""

from torch import Tensor

from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.advantages.scored import Advantages, ScoredResponses

# Keeps the advantages of a group finite when its rewards are equal; verl's value.
_STD_EPSILON = 1e-6


def standardised(values: Tensor, groups: Groups, *, normalize_by_std: bool) -> Tensor:
    """Values [N] less the mean of their group, if so wished divided by its standard deviation + 1e-6."""
    centred = groups.centred(values)
    return centred / (groups.spread(groups.std(values)) + _STD_EPSILON) if normalize_by_std else centred


def grpo(scored: ScoredResponses, *, normalize_by_std: bool) -> Advantages:
    """Scores relative to those of the other responses to the same prompt.

    A_i = (r_i - mean_g) / (std_g + 1e-6), mean and unbiased standard deviation (n - 1) over the group g of response
    i (DeepSeekMath, arXiv:2402.03300, section 4.1.2). Without `normalize_by_std` A_i = r_i - mean_g, as in Dr. GRPO
    (arXiv:2503.20783).
    """
    return scored.alike(standardised(scored.scores, scored.prompts, normalize_by_std=normalize_by_std))
