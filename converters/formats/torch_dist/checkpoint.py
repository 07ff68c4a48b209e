"""Reads a checkpoint in Megatron's distributed format."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from converters.errors import UserError
from converters.formats.mapped_file import MappedFile
from converters.formats.torch_dist.chunk_data import ChunkData, locate, locate_framed, pickle_of_archive
from converters.formats.torch_dist.metadata import METADATA, Chunk, StoredObject, StoredTensor, read_metadata
from converters.formats.torch_dist.unpickling import safe_load

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMMON = "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
_OF_HUGGINGFACE = "config.json"
_MOST_DIGITS = 20
# The last one is megarl's, for a reference model that has changed during training.
_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "dataloader_", "reference.")


def find_checkpoint(folder: Path) -> Path:
    """The folder with `.metadata`: `folder` itself, or the iteration below it that its tracker names.

    Raises UserError if there is neither.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the path of a torch_dist checkpoint or of a folder of several")
    if (folder / METADATA).is_file():
        return folder
    tracker = folder / LATEST
    if not tracker.is_file() and (folder / _OF_HUGGINGFACE).is_file():
        raise UserError(
            f"{folder} is a HuggingFace folder already: megarl export makes one of a torch_dist checkpoint of Megatron,"
            " and megarl convert a checkpoint of this"
        )
    if not tracker.is_file():
        raise UserError(
            f"{folder} has neither {METADATA} nor {LATEST}; give a torch_dist checkpoint or a folder of several"
        )
    latest = tracker.read_text(errors="replace").strip()
    if latest != RELEASE and not (latest.isdecimal() and len(latest) < _MOST_DIGITS):
        raise UserError(f"{tracker} says {latest[:40]!r}, which is neither a number nor {RELEASE!r}")
    found = folder / (RELEASE if latest == RELEASE else f"iter_{int(latest):07d}")
    if not (found / METADATA).is_file():
        raise UserError(f"{tracker} names {found.name}, which has no {METADATA}; it is incomplete or was deleted")
    return found


def is_weight(key: str) -> bool:
    """Whether a key is that of one of the model's weights, not of optimizer state or of another model."""
    return not key.startswith(_NOT_WEIGHTS)


def unwrapped(common: Any) -> Any:
    """The content of an archive at `TorchDistCheckpoint.common_place`: an object is the one item of a list."""
    return common[0] if isinstance(common, list) and len(common) == 1 else common


class TorchDistCheckpoint:
    """The weights of a checkpoint by key. Opening it reads only its table of contents, and never runs code from it.

    Raises UserError if the folder has no checkpoint, or a damaged or incomplete one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = find_checkpoint(Path(folder))
        self.contents = read_metadata(self.folder)
        self._files: dict[str, MappedFile] = {}

    @cached_property
    def weights(self) -> Mapping[str, StoredTensor]:
        """The tensors of the model by key, without the state of an optimizer."""
        return {key: each for key, each in self.contents.tensors.items() if is_weight(key)}

    @property
    def common_place(self) -> StoredObject | None:
        """The archive of `common`: `common.pt`, or with megatron-core 0.19 an object like others; None without any."""
        path = self.folder / COMMON
        if path.is_file():
            return StoredObject(COMMON, 0, path.stat().st_size)
        return self.contents.objects.get(_COMMON_OBJECT)

    @cached_property
    def common(self) -> dict[str, Any]:
        """The content other than tensors; objects of unknown classes become empty records.

        Raises UserError if the file is missing, empty or holds no dict.
        """
        place = self.common_place
        if place is None:
            raise UserError(f"{self.folder} has no {COMMON}; copy the checkpoint again")
        path = self.folder / place.file
        if not place.length:
            raise UserError(f"{path} is empty; copy the checkpoint again")
        content = pickle_of_archive(MappedFile(path), place.offset, place.length, path)
        common = unwrapped(safe_load(content, path))
        if not isinstance(common, dict):
            raise UserError(f"{path} holds no table; copy the checkpoint again")
        return common

    def locate(self, key: str, chunk: Chunk) -> ChunkData:
        """Locate the elements of a chunk in its file. Raises UserError if they do not match `.metadata`."""
        file, dtype = self._file(chunk.file), self.contents.tensors[key].dtype
        if framed := locate_framed(file, chunk.offset, chunk.length, dtype, chunk.box.shape):
            return framed
        where = f"{self.folder / chunk.file} (chunk of {key} at {list(chunk.box.start)})"
        data = locate(file, chunk.offset, chunk.length, where)
        if data.dtype != dtype or data.shape != chunk.box.shape:
            raise UserError(f"{where} holds {data.dtype} of shape {list(data.shape)}; copy the checkpoint again")
        return data

    def read(self, key: str, chunk: Chunk) -> torch.Tensor:
        """A view of a chunk in its mapped file: only what is then touched is read from disk."""
        data = self.locate(key, chunk)
        if not data.nbytes:
            return torch.empty(data.shape, dtype=data.dtype)
        flat = self._file(chunk.file).tensor(data.offset, data.nbytes)
        if data.offset % data.dtype.itemsize:
            flat = flat.clone()
        return flat.view(data.dtype).view(data.shape)

    def checksum_data(self, key: str, chunk: Chunk) -> tuple[memoryview, int]:
        """The bytes of a chunk's storage, and the CRC-32 that they had when they were saved."""
        data = self.locate(key, chunk)
        end = data.storage_offset + data.storage_bytes
        return self._file(chunk.file).view[data.storage_offset : end], data.crc32

    def _file(self, name: str) -> MappedFile:
        if name not in self._files:
            self._files[name] = MappedFile(self.folder / name)
        return self._files[name]
