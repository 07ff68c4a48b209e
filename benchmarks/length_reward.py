"""A reward that costs almost nothing, so that measurements show the controller's own cost."""

from typing import Any


async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:  # noqa: ARG001
    """Return the length in characters over 16,384, at most 1."""
    return min(1.0, len(solution_str) / 16384)
