"""Metrics of one optimizer step, gathered from micro-batches and ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from megarl.tracking import Histogram, MetricValue
from megatron_ext.objective import Objective

Value = TypeVar("Value")

_KL = "policy/kl_to_reference"


def itself(mean: Tensor) -> Tensor:
    """The formula of a plain mean."""
    return mean


@dataclass(frozen=True)
class Mean:
    """A metric computed from the means of one or more quantities over the whole batch.

    Keeps `totals` float64[k], the sums of the k quantities, and `count`, a scalar number of tokens or responses, so
    that pieces of a batch can be added. The value is `formula` of the k means. `formula` is a module-level function,
    so that it can be pickled.
    """

    totals: Tensor
    count: Tensor
    formula: Callable[..., Tensor] = itself

    @staticmethod
    def of(*quantities: Tensor, formula: Callable[..., Tensor] = itself) -> "Mean":
        """Sum over the elements of `quantities`, each [n]; they are detached."""
        totals = torch.stack([quantity.detach().double().sum() for quantity in quantities])
        return Mean(totals, totals.new_tensor(len(quantities[0])), formula)

    def cpu(self) -> "Mean":
        """Copy to the CPU."""
        return Mean(self.totals.cpu(), self.count.cpu(), self.formula)

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.totals + other.totals, self.count + other.count, self.formula)

    @property
    def value(self) -> float:
        """NaN if there was nothing to average."""
        return float(self.formula(*(self.totals / self.count)))


@dataclass(frozen=True)
class BinCounts:
    """A histogram that is summed over the pieces of a batch: `counts` float64[bins] of values between the `edges`."""

    edges: tuple[float, ...]
    counts: Tensor

    def cpu(self) -> "BinCounts":
        """Copy to the CPU."""
        return BinCounts(self.edges, self.counts.cpu())

    def __add__(self, other: "BinCounts") -> "BinCounts":
        return BinCounts(self.edges, self.counts + other.counts)

    @property
    def value(self) -> Histogram:
        """The histogram with integer counts."""
        return Histogram(self.edges, tuple(int(count) for count in self.counts.tolist()))


@dataclass(frozen=True)
class Metrics:
    """Contributions of one piece of a global batch to its metrics, by name; tensors are detached scalars.

    Over the pieces, `sums` and `histograms` are added, `maxima` take the largest, and `means` average over all
    elements. `kl_to_reference` is a mean that also drives an adaptive KL coefficient.
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    means: Mapping[str, Mean] = field(default_factory=dict)
    histograms: Mapping[str, BinCounts] = field(default_factory=dict)
    kl_to_reference: Mean | None = None

    def __or__(self, other: "Metrics") -> "Metrics":
        """Join different metrics of the same piece."""
        return Metrics(
            {**self.sums, **other.sums},
            {**self.maxima, **other.maxima},
            {**self.means, **other.means},
            {**self.histograms, **other.histograms},
            self.kl_to_reference or other.kl_to_reference,
        )

    def cpu(self) -> "Metrics":
        """Copy to the CPU, for processes without a GPU."""
        return Metrics(
            {name: each.cpu() for name, each in self.sums.items()},
            {name: each.cpu() for name, each in self.maxima.items()},
            {name: each.cpu() for name, each in self.means.items()},
            {name: each.cpu() for name, each in self.histograms.items()},
            None if self.kl_to_reference is None else self.kl_to_reference.cpu(),
        )

    @staticmethod
    def merge(pieces: Sequence["Metrics"]) -> "Metrics":
        """Combine the metrics of all `pieces` (at least one), which must have the same names."""
        return Metrics(
            _merge([piece.sums for piece in pieces], torch.add),
            _merge([piece.maxima for piece in pieces], torch.maximum),
            _merge([piece.means for piece in pieces], Mean.__add__),
            _merge([piece.histograms for piece in pieces], BinCounts.__add__),
            _merge([piece._kl() for piece in pieces], Mean.__add__).get(_KL),
        )

    def values(self) -> dict[str, float]:
        """The number of each metric; histograms are left out."""
        return {
            **{name: float(value) for name, value in self.sums.items()},
            **{name: float(value) for name, value in self.maxima.items()},
            **{name: mean.value for name, mean in {**self.means, **self._kl()}.items()},
        }

    def _kl(self) -> dict[str, Mean]:
        return {} if self.kl_to_reference is None else {_KL: self.kl_to_reference}

    @staticmethod
    def summary(steps: Iterable["Metrics"]) -> dict[str, MetricValue]:
        """Reduce each metric over the optimizer `steps` (at least one) of one rollout.

        Sums and means are averaged over the steps, means only over steps with elements; maxima take the largest;
        histograms are added.
        """
        steps = list(steps)
        rows = [step.values() for step in steps]
        counts = _merge([step.histograms for step in steps], BinCounts.__add__)
        numbers = {}
        for name in rows[0]:
            values = [row[name] for row, step in zip(rows, steps, strict=True) if not step._is_of_nothing(name)]
            if name in steps[0].maxima:
                numbers[name] = max(values)
            else:
                numbers[name] = sum(values) / len(values) if values else math.nan
        return {**numbers, **{name: each.value for name, each in counts.items()}}

    def _is_of_nothing(self, name: str) -> bool:
        mean = {**self.means, **self._kl()}.get(name)
        return mean is not None and not mean.count


AnyObjective: TypeAlias = Objective[Any, Metrics]
"""Objective of any model; the head decides whether its predictions are log-probs of labels or values."""


def _merge(pieces: Sequence[Mapping[str, Value]], combine: Callable[[Value, Value], Value]) -> dict[str, Value]:
    if any(piece.keys() != pieces[0].keys() for piece in pieces):
        raise ValueError("micro-batches of one step reported different metrics")
    return {name: reduce(combine, [piece[name] for piece in pieces]) for name in pieces[0]}
