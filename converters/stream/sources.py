"""Sources of a conversion: tensors by name, read by boxes. Several threads call them at once."""

import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

import torch
from isal.isal_zlib import crc32

from converters.boxes import Box
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.fp8 import Scratch, dequantise_into, scales_of
from converters.layouts.torch_dist import Piece

_VIEWS_KEPT = 1024


class Source(Protocol):
    """The tensors of a checkpoint."""

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        """The box as a view of the mapped file; None if it has to be decoded first."""

    def copy_into(self, out: torch.Tensor, name: str, box: Box) -> None:
        """Write the elements of the box to `out`, converted to its dtype."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the tensor's elements after decoding."""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


class HuggingFaceSource:
    """A HuggingFace checkpoint; block FP8 is decoded to bf16. Raises UserError for FP8 without scales."""

    def __init__(self, checkpoint: HuggingFaceCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._dtypes = checkpoint.dtypes
        self._shapes = checkpoint.shapes
        self._thread = _PerThread()
        self._scales = scales_of(checkpoint.folder, self._shapes, self._dtypes)

    def view(self, name: str, box: Box) -> torch.Tensor | None:
        """The box as a view of the mapped file; None for FP8."""
        return None if name in self._scales else self._checkpoint.read(name, box)

    def copy_into(self, out: torch.Tensor, name: str, box: Box) -> None:
        """Write the values of the box. Raises UserError, naming the tensor, for NaN FP8 codes or invalid scales."""
        view = self._checkpoint.read(name, box)
        if name not in self._scales:
            out.copy_(view)
            return
        names = self._scales[name]
        scales = self._checkpoint.read(names, Box.whole(self._shapes[names])).float()
        try:
            dequantise_into(
                view,
                scales,
                out,
                row_start=box.start[0],
                column_start=box.start[1],
                scratch=self._thread.scratch,
            )
        except ValueError as error:
            raise UserError(f"{self._checkpoint.folder} holds {name} with {error}; copy it again") from error

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the file; bf16 for FP8."""
        return torch.bfloat16 if name in self._scales else self._dtypes[name]


class TorchDistSource:
    """The pieces of a distributed checkpoint, under the names that their layout gives them.

    Raises UserError for a chunk whose checksum differs from the saved one.
    """

    def __init__(self, checkpoint: TorchDistCheckpoint, pieces: Iterable[Piece]) -> None:
        self._checkpoint, self._pieces = checkpoint, {piece.name: piece for piece in pieces}
        self._piece = lru_cache(_VIEWS_KEPT)(self._read_piece)

    def view(self, name: str, box: Box) -> torch.Tensor:
        """The box as a view of the mapped file."""
        return self._piece(name)[box.slices()]

    def copy_into(self, out: torch.Tensor, name: str, box: Box) -> None:
        """Write the values of the box."""
        out.copy_(self.view(name, box))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the checkpoint."""
        return self._checkpoint.weights[self._pieces[name].key].dtype

    def _read_piece(self, name: str) -> torch.Tensor:
        piece = self._pieces[name]
        chunk = self._checkpoint.weights[piece.key].chunks[piece.chunk]
        elements, saved = self._checkpoint.checksum_data(piece.key, chunk)
        # Torch writes 0 if told not to compute the checksum.
        if saved and crc32(elements) != saved:
            raise UserError(
                f"{self._checkpoint.folder / chunk.file} is damaged: the chunk of {piece.key} at"
                f" {list(chunk.box.start)} has another checksum than when it was saved; copy it again"
            )
        return self._checkpoint.read(piece.key, chunk)[piece.index]
