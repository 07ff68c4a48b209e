"""Statistics of a step's advantages, from summaries of stretches of tokens, as a step may have 100 million tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AdvantageStretches:
    """Summaries of the advantages of K stretches of trained tokens, each within one response; all arrays are [K]."""

    responses: npt.NDArray[np.int64]
    """Index of the response of each stretch."""
    tokens: Array
    means: Array
    squares: Array
    """Sums of squared differences from the mean."""
    largest: Array
    smallest: Array
    positive: Array
    """Tokens whose advantage is above 0."""
    zero: Array
    """Tokens whose advantage is exactly 0."""

    @classmethod
    def of_equal(cls, advantages: Array, tokens: Array, responses: npt.NDArray[np.int64]) -> "AdvantageStretches":
        """Stretches of `tokens` [K] tokens, whose tokens all have the advantage in `advantages` [K]."""
        nothing = np.zeros(len(advantages))
        positive, zero = tokens * (advantages > 0), tokens * (advantages == 0)
        return cls(responses, tokens, advantages, nothing, advantages, advantages, positive, zero)

    @classmethod
    def of_different(cls, stretches: Iterable[tuple[int, npt.NDArray[np.float32]]]) -> "AdvantageStretches":
        """Stretches given as (response, advantage of every token), each of at least one token."""
        rows = [(response, *_summary(advantages.astype(np.float64))) for response, advantages in stretches]
        responses, *columns = np.array(rows, dtype=np.float64).reshape(-1, 8).T
        return cls(responses.astype(np.int64), *columns)

    def __add__(self, other: "AdvantageStretches") -> "AdvantageStretches":
        return AdvantageStretches(
            *(np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def _summary(advantages: Array) -> tuple[float, ...]:
    mean = advantages.mean()
    differences = advantages - mean
    return (
        len(advantages),
        float(mean),
        float(differences @ differences),
        float(advantages.max()),
        float(advantages.min()),
        int(np.count_nonzero(advantages > 0)),
        int(np.count_nonzero(advantages == 0)),
    )


def advantage_metrics(stretches: AdvantageStretches) -> dict[str, float]:
    """Statistics of the advantages of a step's trained tokens; empty if no token is trained.

    Tokens whose advantage is exactly 0 teach nothing: the rewards of their groups do not differ.
    """
    tokens, means = stretches.tokens, stretches.means
    if not tokens.size:
        return {}
    total, sums = tokens.sum(), means * tokens
    mean = sums.sum() / total
    counts = np.bincount(stretches.responses, tokens)
    of_responses = np.bincount(stretches.responses, sums)[counts > 0] / counts[counts > 0]
    squares = stretches.squares + tokens * np.square(means - mean)
    return {
        "advantage/mean": float(mean),
        "advantage/response_mean": float(of_responses.mean()),
        "advantage/std": float(np.sqrt(squares.sum() / total)),
        "advantage/max": float(stretches.largest.max()),
        "advantage/min": float(stretches.smallest.min()),
        "advantage/positive_fraction": float(stretches.positive.sum() / total),
        "advantage/zero_fraction": float(stretches.zero.sum() / total),
    }
