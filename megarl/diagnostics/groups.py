"""Learning signal in the groups of a step: one with equal rewards gives no advantage to any of its responses."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

RIGHT_ABOVE = 0.5
"""A response counts as right if its reward is above this: half of what a verifier gives for a right answer."""


def group_metrics(rewards: Sequence[float], groups: Sequence[int]) -> dict[str, float]:
    """Shares of the groups: without a difference in reward, all right, all wrong.

    Response i has `rewards[i]` and belongs to `groups[i]`; there is at least one. Right and wrong are those of
    `RIGHT_ABOVE`.
    """
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    lowest = np.array([min(found) for found in members.values()])
    highest = np.array([max(found) for found in members.values()])
    return {
        "groups/no_signal": float(np.mean(lowest == highest)),
        "groups/all_right": float(np.mean(lowest > RIGHT_ABOVE)),
        "groups/all_wrong": float(np.mean(highest <= RIGHT_ABOVE)),
    }
