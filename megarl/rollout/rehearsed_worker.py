"""Findings about an engine's worker that was built without memory: bytes it would hold, and its layout of weights."""

from dataclasses import dataclass

from converters.layouts.traced_layout import LoadTrace


@dataclass(frozen=True)
class RehearsedWorker:
    """Bytes of a worker, counted on the engine's own model.

    Example: a worker of 16 of DeepSeek-V3 in block FP8 has 43 GB of weights, and 70 KB for each token.
    """

    weights: int
    """Parameters and buffers, with what the engine derives from weights when it has loaded them."""
    longest: int
    """Keys and values of the longest sequence that the engine takes."""
    longest_tokens: int
    """How many tokens that has."""
    data_parallel: int
    """Its data-parallel rank: each has sequences of its own."""
    trace: LoadTrace

    @property
    def token(self) -> float:
        """Keys and values of one token."""
        return self.longest / self.longest_tokens
