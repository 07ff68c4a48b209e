"""The metrics that two runs of the same numbers have in common."""

from collections.abc import Mapping
from typing import Any

TIMINGS = ("seconds/", "throughput/")


def without_timings(metrics: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Metrics of a step but for those of its time, and those whose names begin with one of `others`."""
    return {name: value for name, value in metrics.items() if not name.startswith((*TIMINGS, *others))}
