"""The advantages of a step."""

import numpy as np
from numpy.typing import ArrayLike


def advantage_metrics(advantages: ArrayLike, lengths: ArrayLike) -> dict[str, float]:
    """Statistics of the `advantages` [T] of the trained tokens, of responses of `lengths` [N] of them end to end.

    There are none where no token is trained.

    A share that is exactly 0 teaches nothing: it is that of groups without a difference in reward.
    """
    values = np.asarray(advantages, dtype=np.float64)
    if not values.size:
        return {}
    lengths = np.asarray(lengths)
    lengths = lengths[lengths > 0]
    of_responses = np.add.reduceat(values, lengths.cumsum() - lengths) / lengths
    return {
        "advantage/mean": float(values.mean()),
        "advantage/response_mean": float(of_responses.mean()),
        "advantage/std": float(values.std()),
        "advantage/max": float(values.max()),
        "advantage/min": float(values.min()),
        "advantage/positive_fraction": float(np.mean(values > 0)),
        "advantage/zero_fraction": float(np.mean(values == 0)),
    }
