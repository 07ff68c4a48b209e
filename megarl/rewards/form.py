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
    """Score 1.0 where the whole response, white space at the ends aside, matches a regular expression, else 0.0.

    A dot matches line ends, too. A response that takes too long to match scores 0.0, and 1.0 in the part "unchecked".
    """
    return {"score": float(re.fullmatch(pattern, solution_str.strip(), re.DOTALL) is not None), "unchecked": 0.0}


def check_pattern(pattern: str) -> None:
    """Raise `ValueError` for a pattern that is no regular expression."""
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
    """Raise `ValueError` for lengths of length_penalty that cannot be."""
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
    """Return the share of a response's runs of `words` words that are repeated, times -1.

    -(1 - different runs / all runs); 0 for a response of fewer words. The repetition penalty of arXiv 2502.03373,
    appendix C.2, at full weight.
    """
    found = solution_str.split()
    runs = [tuple(found[start : start + words]) for start in range(len(found) - words + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


def check_words(words: int = 4) -> None:
    """Raise `ValueError` for runs of no words."""
    if words < 1:
        raise ValueError(f"words={words} must be at least 1")
