"""Boxes that are in high precision in a rank's tensor and in a number format in a bucket."""

from dataclasses import dataclass

from torch import Tensor

from converters.number_formats import FP8_BLOCK, NumberFormat


@dataclass(frozen=True)
class Quantised:
    """A box of one of this rank's tensors, in bfloat16 or float32, and what stands for it in the bucket.

    `local` begins at the corner of a block. In the bucket lie `codes`, of its shape, and `scales`, one per block, both
    contiguous.

    Example: `local` bfloat16 [256, 384], `codes` [256, 384], `scales` [2, 3].
    """

    name: str
    """Name of the local tensor."""
    local: Tensor
    codes: Tensor
    scales: Tensor
    number_format: NumberFormat = FP8_BLOCK

    def quantise(self) -> None:
        """Make codes and scales in torch. Raises ValueError, naming the tensor, for what has none."""
        try:
            self.number_format.quantise_into(self.local, self.codes, self.scales)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
