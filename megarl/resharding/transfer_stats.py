"""How much a refit moved."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TransferStats:
    """Bytes that went from the trainer's ranks to the engines; where changes alone travel, also how many there were.

    Example: `TransferStats(8_300_000, compared=134_500_000, changed=1_200_000)`.
    """

    size_bytes: int = 0
    compared: int = 0
    """Units of two bytes that were compared with what had been sent before: elements of bf16."""
    changed: int = 0
    """Units among them that were not the same."""

    def __add__(self, other: "TransferStats") -> "TransferStats":
        return TransferStats(
            self.size_bytes + other.size_bytes, self.compared + other.compared, self.changed + other.changed
        )
