"""Rewards for the form of a response: format, length and repetition."""

import re
from typing import Any


def format(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,  # noqa: ARG001
    extra_info: Any = None,  # noqa: ARG001
    *,
    pattern: str,
) -> dict[str, float]:
    """Score 1.0 if the whole response, stripped of white space, matches the regular expression `pattern`, else 0.0.

    A dot also matches line ends. A response that takes too long to match scores 0.0, and 1.0 in the part "unchecked".
    """
    return {"score": float(re.fullmatch(pattern, solution_str.strip(), re.DOTALL) is not None), "unchecked": 0.0}


def check_pattern(pattern: str) -> None:
    """Raise `ValueError` unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error


def length_penalty(
    data_source: str,  # noqa: ARG001
    solution_str: str,  # noqa: ARG001
    ground_truth: Any,  # noqa: ARG001
    extra_info: Any = None,  # noqa: ARG001
    *,
    response_tokens: int,
    free_tokens: int,
    max_tokens: int,
) -> float:
    """Return -clip((response_tokens - free_tokens) / (max_tokens - free_tokens), 0, 1): 0 for short responses.

    The penalty grows linearly from `free_tokens` to -1 at `max_tokens`, and stays there.
    """
    return -min(max((response_tokens - free_tokens) / (max_tokens - free_tokens), 0.0), 1.0)


def check_lengths(free_tokens: int, max_tokens: int) -> None:
    """Raise `ValueError` unless 0 <= `free_tokens` < `max_tokens`."""
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(f"free_tokens={free_tokens} must be at least 0 and below max_tokens={max_tokens}")


def repetition_penalty(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,  # noqa: ARG001
    extra_info: Any = None,  # noqa: ARG001
    *,
    words: int = 4,
) -> float:
    """Return minus the share of repeated word n-grams, n = `words`: -(1 - distinct n-grams / all n-grams).

    0 for a response of fewer words. The repetition penalty of arXiv:2502.03373, appendix C.2, at full weight.
    """
    found = solution_str.split()
    runs = [tuple(found[start : start + words]) for start in range(len(found) - words + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


def check_words(words: int = 4) -> None:
    """Raise `ValueError` unless `words` is at least 1."""
    if words < 1:
        raise ValueError(f"words={words} must be at least 1")
