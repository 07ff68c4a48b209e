"""The result of a quickstart: whether the model learned, and whether the export matches it."""

from typing import NamedTuple


class Outcome(NamedTuple):
    """Held-out accuracies at the end of a quickstart.

    Example: Outcome(trained=0.8828, exported=0.8828, tolerance=0.0, bar=0.6)
    """

    trained: float
    exported: float
    """Accuracy of the export in a fresh engine."""
    tolerance: float
    """Allowed difference of the two."""
    bar: float | None
    """Minimum accuracy of such a run; None if its number of steps is not the model's own."""

    @property
    def export_is_confirmed(self) -> bool:
        """Whether the export is as accurate as the trained model."""
        return abs(self.exported - self.trained) <= self.tolerance

    @property
    def has_learned(self) -> bool:
        """Whether the minimum accuracy, if there is one, was reached."""
        return self.bar is None or self.trained >= self.bar

    def sentence(self, engine: str) -> str:
        """The outcome in words, for the engine `engine`."""
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
