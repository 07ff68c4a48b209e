"""The result of building an engine's worker without allocating memory: bytes it would hold, and its weight layout."""

from dataclasses import dataclass

from converters.layouts.traced_layout import LoadTrace


@dataclass(frozen=True)
class RehearsedWorker:
    """Memory of a worker in bytes, counted on the engine's own model.

    Example: a worker of 16 of DeepSeek-V3 in block FP8 has 43 GB of weights, and 70 KB for each token.
    """

    weights: int
    """Parameters and buffers, what the engine derives from weights after loading, and the slot of an adapter."""
    longest: int
    """KV cache of the longest sequence that the engine accepts."""
    longest_tokens: int
    """Tokens of that sequence."""
    data_parallel: int
    """The worker's data-parallel rank; each has its own sequences."""
    trace: LoadTrace

    @property
    def token(self) -> float:
        """KV cache of one token, in bytes."""
        return self.longest / self.longest_tokens
