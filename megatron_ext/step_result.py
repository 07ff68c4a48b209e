"""The result of an optimizer step."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step: on one rank, or of all that share its batch."""

    metrics: list[Any]
    """The objective's metrics of each micro-batch; empty on all but the last pipeline stage."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float
    """The rate that the step used."""
    expert_load: Tensor | None = None
    """int64[layers, experts]: how many tokens each expert got, of all ranks; None of a model without experts."""
