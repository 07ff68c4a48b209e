"""A reward that even a random model gets at times, in its own small file, since every scoring process loads it."""

from typing import Any


def share_of_digits(solution_str: str, **_: Any) -> float:
    """The share of digits among a response's characters; 0 for an empty response."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
