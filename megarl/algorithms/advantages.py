"""Advantages: how much better a response is than expected."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from converters.errors import UserError

# Keeps the advantages of a group finite when its rewards are equal; verl's value.
_STD_EPSILON = 1e-6


class Advantage(Protocol):
    """Rewards [N] of responses in the groups [N] (any integers, in any order) to advantages [N]."""

    def __call__(self, rewards: Tensor, groups: Tensor, *, normalize_by_std: bool) -> Tensor:
        """One advantage per response, in the order of the responses."""
        ...


def grpo(rewards: Tensor, groups: Tensor, *, normalize_by_std: bool) -> Tensor:
    """Rewards relative to those of the other responses to the same prompt.

    A_i = (r_i - mean_g) / (std_g + 1e-6), mean and unbiased standard deviation (n - 1) over the group g of response
    i (DeepSeekMath, arXiv:2402.03300, section 4.1.2). Without `normalize_by_std` A_i = r_i - mean_g, as in Dr. GRPO
    (arXiv:2503.20783).

    Raises UserError for a group of one response, whose advantage would be undefined, and for a reward that is not a
    finite number.
    """
    if not bool(rewards.isfinite().all()):
        raise UserError(
            f"reward {float(rewards[~rewards.isfinite()][0])} is not a finite number: check the reward function"
        )
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        raise UserError(
            "GRPO compares the responses to one prompt with each other, but a prompt has only one response: raise "
            "loop.samples_per_prompt to at least 2 (with reward.on_error=drop, failed rewards make groups smaller)"
        )
    # In float64 equal rewards have their exact mean, so that a group without differences gets advantages of 0.
    exact = rewards.double()
    centred = exact - _sum_by_group(exact, index, counts)[index] / counts[index]
    if normalize_by_std:
        variance = _sum_by_group(centred.square(), index, counts) / (counts - 1)
        centred = centred / (variance.sqrt() + _STD_EPSILON)[index]
    return centred.to(rewards.dtype)


def _sum_by_group(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, index, values)


ADVANTAGES: Mapping[str, Advantage] = {"grpo": grpo}
