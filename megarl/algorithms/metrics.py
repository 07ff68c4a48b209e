"""Metrics of one optimizer step, gathered from micro-batches and ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True)
class Metrics:
    """What one piece of a global batch contributes, detached scalars by name.

    The value of the global batch is the sum of the `sums` and the largest of the `maxima` of all its pieces.
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def merge(pieces: Sequence["Metrics"]) -> "Metrics":
        """The metrics of all `pieces` (at least one) together; all must have the same names."""
        return Metrics(
            _merge([piece.sums for piece in pieces], torch.add),
            _merge([piece.maxima for piece in pieces], torch.maximum),
        )


def _merge(pieces: Sequence[Mapping[str, Tensor]], combine: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    if any(piece.keys() != pieces[0].keys() for piece in pieces):
        raise ValueError("micro-batches of one step reported different metrics")
    return {name: reduce(combine, [piece[name] for piece in pieces]) for name in pieces[0]}
