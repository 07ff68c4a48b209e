"""What a rank says of an optimizer step."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step on one rank."""

    metrics: list[Any]
    """The objective's metrics of each micro-batch; empty on all but the last pipeline stage."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float
    """The rate that the step used."""
