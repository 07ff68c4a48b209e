"""A reward that costs nothing: what is measured beside it is the controller's own."""

from typing import Any


async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:  # noqa: ARG001
    """Return the share of the first 16,384 characters that there are, 0 to 1."""
    return min(1.0, len(solution_str) / 16384)
