"""The weights of a checkpoint of either kind by their HuggingFace names, read a box at a time."""

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from converters.architectures import Architecture
from converters.boxes import Box
from converters.errors import UserError
from converters.examine.opening import Checkpoint
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.fp8 import scales_of
from converters.layout import Shape
from converters.layouts.torch_dist import stored_pieces
from converters.megatron_to_hf import plan_export
from converters.stream.sources import HuggingFaceSource, TorchDistSource

_BLOCK_ELEMENTS = 2**20
_ALL_IN_ONE_FILE = 2**62


class Weights(Protocol):
    """Tensors by HuggingFace name; block FP8 is decoded to bf16. Read from several threads at once.

    A tensor that a thread has read is valid until that thread reads again.
    """

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The elements of the box."""


class _Buffer(threading.local):
    """A per-thread buffer that is reused, because glibc's heap grows with aligned allocations of many sizes."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with arbitrary content."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).view(shape)


class HuggingFaceWeights:
    """The tensors of a HuggingFace folder, without the scales of those in FP8."""

    def __init__(self, checkpoint: HuggingFaceCheckpoint) -> None:
        self._source = HuggingFaceSource(checkpoint)
        self._buffer = _Buffer()
        shapes = checkpoint.shapes
        scales = set(scales_of(checkpoint.folder, shapes, checkpoint.dtypes).values())
        names = [name for name in shapes if name not in scales]
        self.shapes: Mapping[str, Shape] = {name: shapes[name] for name in names}
        self.dtypes: Mapping[str, torch.dtype] = {name: self._source.dtype(name) for name in names}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The elements of the box."""
        view = self._source.view(name, box)
        if view is None:
            view = self._buffer.of(box.shape, self.dtypes[name])
            self._source.copy_into(view, name, box)
        return view


class MegatronWeights:
    """The tensors of the model in a torch_dist checkpoint.

    Raises UserError if they are not those of the architecture, or are incomplete.
    """

    def __init__(self, checkpoint: TorchDistCheckpoint, architecture: Architecture) -> None:
        shapes = {key: each.shape for key, each in checkpoint.weights.items()}
        boxes = {key: [chunk.box for chunk in each.chunks] for key, each in checkpoint.weights.items()}
        pieces = list(stored_pieces(architecture, shapes, boxes))
        self._source = TorchDistSource(checkpoint, pieces)
        self._buffer = _Buffer()
        plan = plan_export(architecture, pieces, self._source, copies=(), fp8=False, shard_size_bytes=_ALL_IN_ONE_FILE)
        self._parts = {target.name: target.parts for target in plan.targets}
        self.shapes: Mapping[str, Shape] = plan.shapes
        self.dtypes: Mapping[str, torch.dtype] = plan.dtypes

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The elements of the box, gathered from all chunks that contain some."""
        out = self._buffer.of(box.shape, self.dtypes[name])
        for part in self._parts[name]:
            if piece := part.box.intersect(box):
                source_box = piece.relative_to(part.box).shift(part.source_box.start)
                self._source.copy_into(out[piece.relative_to(box).slices()], part.source, source_box)
        return out


def weights_of(checkpoint: Checkpoint, architecture: Architecture | None) -> Weights:
    """The weights of a checkpoint. Raises UserError for a torch_dist checkpoint of an unknown architecture."""
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        return HuggingFaceWeights(checkpoint)
    if architecture is None:
        raise UserError(
            f"{checkpoint.folder} comes without the config.json of its model; name the folder that has it with"
            " --hf-config"
        )
    return MegatronWeights(checkpoint, architecture)


def blocks(shape: Shape) -> Iterator[Box]:
    """Cut a tensor into boxes of whole rows with about a million elements each."""
    whole = Box.whole(shape)
    if not shape or not whole.size:
        yield whole
        return
    rows = max(1, _BLOCK_ELEMENTS * shape[0] // whole.size)
    for start in range(0, shape[0], rows):
        yield Box((start, *whole.start[1:]), (min(start + rows, shape[0]), *whole.stop[1:]))
