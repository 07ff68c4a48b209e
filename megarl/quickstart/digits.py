"""A reward that a model which knows nothing gets at times; a file of its own, since every scoring process loads it."""

from typing import Any


def share_of_digits(solution_str: str, **_: Any) -> float:
    """The part of a response's characters that are digits; 0 of none."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
