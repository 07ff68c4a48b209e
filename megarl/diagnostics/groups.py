"""Learning signal in the groups of a step: one with equal rewards gives no advantage to any of its responses."""

from collections.abc import Sequence

import numpy as np

RIGHT_ABOVE = 0.5
"""A response counts as right if its reward is above this: half of what a verifier gives for a right answer."""


def group_metrics(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of the groups: without a difference in reward, all right, all wrong.

    `rewards` are those of each group; there is at least one. Right and wrong are those of `RIGHT_ABOVE`.
    """
    lowest, highest = np.array([min(each) for each in rewards]), np.array([max(each) for each in rewards])
    return {
        "groups/no_signal": float(np.mean(lowest == highest)),
        "groups/all_right": float(np.mean(lowest > RIGHT_ABOVE)),
        "groups/all_wrong": float(np.mean(highest <= RIGHT_ABOVE)),
    }
