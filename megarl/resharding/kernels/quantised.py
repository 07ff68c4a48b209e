"""Boxes that are in high precision in a rank's tensor, and quantised in a bucket."""

from dataclasses import dataclass

from torch import Tensor

from converters.number_formats import FP8_BLOCK, NumberFormat


@dataclass(frozen=True)
class Quantised:
    """A box of one of this rank's tensors, in bfloat16 or float32, and its quantised form in the bucket.

    `local` begins at the corner of a block. `codes`, of its shape, and `scales`, one per block, are contiguous views of
    the bucket.

    Example: `local` bfloat16 [256, 384], `codes` [256, 384], `scales` [2, 3].
    """

    name: str
    """Name of the local tensor."""
    local: Tensor
    codes: Tensor
    scales: Tensor
    number_format: NumberFormat = FP8_BLOCK

    def quantise(self) -> None:
        """Write codes and scales in torch.

        Raises ValueError, naming the tensor, for values that cannot be quantised.
        """
        try:
            self.number_format.quantise_into(self.local, self.codes, self.scales)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
