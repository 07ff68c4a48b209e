"""The result of a quickstart: whether it learned, and whether its export is the trained model."""

from typing import NamedTuple


class Outcome(NamedTuple):
    """Held-out accuracies at the end of a quickstart.

    Example: Outcome(trained=0.8828, exported=0.8828, tolerance=0.0, bar=0.6)
    """

    trained: float
    exported: float
    """Accuracy of the export in a fresh engine."""
    tolerance: float
    """By how much the two may be apart."""
    bar: float | None
    """The least that a run like this reaches; None for another number of steps than the model's own."""

    @property
    def export_is_confirmed(self) -> bool:
        """Whether the export is as good as training said."""
        return abs(self.exported - self.trained) <= self.tolerance

    @property
    def has_learned(self) -> bool:
        """Whether the bar, if there is one, is reached."""
        return self.bar is None or self.trained >= self.bar

    def sentence(self, engine: str) -> str:
        """The outcome in words, for an engine of this name."""
        if not self.export_is_confirmed:
            return (
                f"The export gives accuracy {self.exported:.4f} in a fresh {engine}, but training ended with"
                f" {self.trained:.4f}: the exported model is not the trained one."
            )
        if not self.has_learned:
            return (
                f"Training ended with accuracy {self.trained:.4f}, but its number of steps reaches {self.bar} at least:"
                " it has not learned; curves.png shows from where on."
            )
        return f"The export was loaded by {engine} afresh and gives the same held-out accuracy, {self.exported:.4f}."
