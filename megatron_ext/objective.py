"""The objective that a train step minimises, and the result of the step."""

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

    The weights include the global denominator, so the loss is the sum over all micro-batches and ranks, and the
    gradient does not depend on how the batch is split over them.
    """

    def __call__(self, predictions: Predictions, micro_batch: MicroBatch) -> tuple[Tensor, StepMetrics]:
        """Compute the scalar loss of one micro-batch, and its metrics.

        `predictions` are LogProbs of the micro-batch's labels or, for a model with a value head, the values
        float32[T']: index i is the value of the state in which token i + 1 is chosen. The score of a sequence is the
        value at its last token (`packing.last_tokens`).
        """
        ...


@dataclass(frozen=True)
class StepResult(Generic[StepMetrics]):
    """The result of one optimizer step: of one rank, or of all ranks that share its batch."""

    metrics: Sequence[StepMetrics]
    """The objective's metrics of each micro-batch; empty on all but the last pipeline stage."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float
    """The learning rate that the step used."""
    expert_load: Tensor | None = None
    """int64[layers, experts]: how many tokens each expert got, over all ranks; None for a model without experts."""
    replayed: Tensor | None = None
    """int64[4], over all ranks; None if no routing was replayed. The first two count pairs of a token and a layer:
    those with the engine's experts, and those of them whose experts differ from the router's choice. The last two count
    tokens: those with the engine's experts in any layer, and those with a difference in any layer."""
    mtp: Tensor | None = None
    """float64[D, 2]: for each of D prediction layers, the mean of -log p over the tokens that it predicts, and the
    fraction that were its greedy choice; for one rank, its contribution to these. None if no layer trains, and before
    the last pipeline stage."""
    router_losses: Mapping[str, float] = field(default_factory=dict)
    """Value of each router loss that the step added, by name: the mean over layers with experts."""
