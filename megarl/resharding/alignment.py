"""The alignment of tensors in a bucket."""

ALIGNMENT_BYTES = 64
"""A cache line: enough for any dtype and for vector loads."""


def aligned(size_bytes: int) -> int:
    """Round `size_bytes` up to a multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
