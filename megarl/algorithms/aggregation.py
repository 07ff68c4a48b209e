"""Aggregations: the weight of every response token in the loss of the global batch.

The weights of one optimizer step sum to 1. The loss is the weighted sum over all tokens of all micro-batches on all
ranks, so no cut of the work can change it.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from converters.errors import UserError


def token_mean(response_lengths: Tensor) -> Tensor:
    """Every token counts the same, 1 / sum(lengths): [sum(lengths)] for the response lengths [N] (DAPO, equation 8).

    Raises UserError if there is no token at all.
    """
    total = int(response_lengths.sum())
    if total == 0:
        raise UserError("no response of this step has a token to train on: check the rollout and the reward function")
    return torch.full((total,), 1.0 / total, device=response_lengths.device)


AGGREGATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"token_mean": token_mean}
