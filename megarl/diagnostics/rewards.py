"""The rewards of a step."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megarl.data import PromptGroup


def reward_metrics(sampled: Sequence[PromptGroup]) -> dict[str, float]:
    """Statistics of the rewards, of those of each data source, and of their named parts; there is at least one.

    Failures are counted over all that was to be scored, greedy baselines included.
    """
    scored = [(group.prompt.data_source, each) for group in sampled for each in group.only_scored().trajectories]
    failures = [each.failure for group in sampled for each in group.members if each.failure is not None]
    rewards = np.array([trajectory.reward for _, trajectory in scored])
    parts: dict[str, list[float]] = defaultdict(list)
    sources: dict[str, list[float]] = defaultdict(list)
    for source, trajectory in scored:
        sources[source].append(trajectory.reward)
        for name, value in trajectory.scored.parts.items():
            parts[name].append(value)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "reward/dropped": float(len(failures)),
        "reward/timed_out": float(failures.count("timed_out")),
        **{f"reward/source/{name}/mean": float(np.mean(values)) for name, values in sources.items()},
        **{f"reward/part/{name}": float(np.mean(values)) for name, values in parts.items()},
    }
