"""A digest of a model's weights that is read in seconds."""

import hashlib
import re

from converters.architectures import Architecture
from converters.boxes import Box
from converters.examine.opening import Checkpoint
from converters.examine.weights import weights_of
from converters.layout import Shape

_NUMBER = re.compile(r"\d+")


def weights_digest(checkpoint: Checkpoint, architecture: Architecture) -> str:
    """A digest of one row of a tensor of each kind, such as the query projections of all layers.

    Copies of a model have the same one, whatever their format, files, parallel sizes or dtype, as long as the values
    are equal. Any training changes it, unless it changes but a few tensors of a kind.
    """
    weights, digest = weights_of(checkpoint, architecture), hashlib.blake2b(digest_size=16)
    names = [name for name in architecture.hf_shapes if name not in architecture.hf_zero_if_missing]
    for name in {_NUMBER.sub("*", name): name for name in names}.values():
        row = weights.read(name, _middle_row(architecture.hf_shapes[name]))
        digest.update(name.encode())
        digest.update(row.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _middle_row(shape: Shape) -> Box:
    if len(shape) < 2:
        return Box.whole(shape)
    middle = shape[0] // 2
    return Box((middle, *(0 for _ in shape[1:])), (middle + 1, *shape[1:]))
