"""Megatron's distributed checkpoints (torch_dist): `.distcp` files of chunks and a table of contents."""

from converters.formats.torch_dist.checkpoint import (
    COMMON,
    LATEST,
    RELEASE,
    TorchDistCheckpoint,
    find_checkpoint,
    is_weight,
    unwrapped,
)
from converters.formats.torch_dist.framing import frame
from converters.formats.torch_dist.metadata import (
    METADATA,
    Chunk,
    Contents,
    StoredObject,
    StoredTensor,
    load_metadata,
    read_metadata,
    write_metadata,
)

__all__ = [
    "COMMON",
    "LATEST",
    "METADATA",
    "RELEASE",
    "Chunk",
    "Contents",
    "StoredObject",
    "StoredTensor",
    "TorchDistCheckpoint",
    "find_checkpoint",
    "frame",
    "is_weight",
    "load_metadata",
    "read_metadata",
    "unwrapped",
    "write_metadata",
]
