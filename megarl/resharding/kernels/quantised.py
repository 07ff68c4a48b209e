"""Boxes that are in high precision in a rank's tensor and in block FP8 in a bucket."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Quantised:
    """A box of one of this rank's tensors, in bfloat16 or float32, and what stands for it in the bucket.

    `local` begins at the corner of a block of 128 x 128. In the bucket lie `codes` (float8_e4m3fn, of its shape) and
    `scales` (float32, one per block), both contiguous.

    Example: `local` bfloat16 [256, 384], `codes` [256, 384], `scales` [2, 3].
    """

    name: str
    """Name of the local tensor."""
    local: Tensor
    codes: Tensor
    scales: Tensor
    power_of_two: bool = False
    """Whether scales are rounded up to powers of two."""
