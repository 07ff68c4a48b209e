"""Objective that a train step minimises, and the result of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from megatron_ext.packing.packing import MicroBatch

Predictions = TypeVar("Predictions", contravariant=True)
"""Predictions of a model for a micro-batch."""
StepMetrics = TypeVar("StepMetrics", covariant=True)
"""Metrics of a micro-batch."""


class Objective(Protocol[Predictions, StepMetrics]):
    """A sum over tokens whose weights are normalised over the global batch.

    Because the weights already carry the global denominator, the sum of all micro-batches' losses on all ranks is the
    loss, and no cut of the work into micro-batches or ranks changes a gradient.
    """

    def __call__(self, predictions: Predictions, micro_batch: MicroBatch) -> tuple[Tensor, StepMetrics]:
        """The scalar loss of one micro-batch and its metrics.

        `predictions` are LogProbs of the micro-batch's labels; of a model with a value head float32[T'], the values:
        index i is that of the state in which token i + 1 comes next, and the score of a sequence that of its last token
        (`packing.last_tokens`).
        """
        ...


@dataclass(frozen=True)
class StepResult(Generic[StepMetrics]):
    """The outcome of one optimizer step: on one rank, or of all that share its batch."""

    metrics: Sequence[StepMetrics]
    """The objective's metrics of each micro-batch; empty on all but the last pipeline stage."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float
    """The rate that the step used."""
    expert_load: Tensor | None = None
    """int64[layers, experts]: how many tokens each expert got, of all ranks; None of a model without experts."""
    replayed: Tensor | None = None
    """int64[4]: how many choices of a token in a layer were an engine's, and how many of them were not the router's;
    how many tokens had such choices, and how many had one that was not the router's. They are those of all ranks; None
    where none was replayed."""
    mtp: Tensor | None = None
    """float64[D, 2]: for each of D prediction layers the mean of -log p of the tokens that it predicts, and the share
    that were its first choice; of one rank its part of them. None where none trains, and before the last stage."""
    router_losses: Mapping[str, float] = field(default_factory=dict)
    """Value of each loss of the routers that the step added, by name: the mean over layers with experts."""
