"""A reward for benchmarks: every response gets one, and they differ, so that each has an advantage to train on."""

from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:  # noqa: ARG001
    """Return the share of digits among the characters, 0 to 1: 0.5 for `"a1"`."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
