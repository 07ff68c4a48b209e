"""How much a refit moved."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TransferStats:
    """Bytes sent from the trainer's ranks to the engines, and the number of changed units if only changes travel.

    Example: `TransferStats(8_300_000, compared=134_500_000, changed=1_200_000)`.
    """

    size_bytes: int = 0
    compared: int = 0
    """Two-byte units (bf16 elements) that were compared with the version sent before."""
    changed: int = 0
    """Units among them that differed."""

    def __add__(self, other: "TransferStats") -> "TransferStats":
        return TransferStats(
            self.size_bytes + other.size_bytes, self.compared + other.compared, self.changed + other.changed
        )
