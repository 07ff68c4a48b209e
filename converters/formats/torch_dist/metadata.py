"""`.metadata`, the table of contents of a torch_dist checkpoint."""

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from converters.boxes import Box
from converters.errors import UserError
from converters.formats.torch_dist.unpickling import safe_load
from converters.layout import Shape

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, stored by itself at `offset` to `offset + length` of a file."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its key: its shape without the cut, and its chunks."""

    shape: Shape
    dtype: torch.dtype
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A pickled object, stored at `offset` to `offset + length` of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, by key."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]


def read_metadata(folder: Path) -> Contents:
    """The contents of the checkpoint in `folder`. No code of the file runs.

    Raises UserError where `.metadata` is missing, damaged or contradicts itself, where it names a file outside the
    folder or one that is missing, and where a file is shorter than its chunks.
    """
    path = folder / METADATA
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {METADATA}; give the folder of a complete torch_dist checkpoint") from error
    loaded = safe_load(content, path)
    if not isinstance(loaded, dcp.Metadata) or not isinstance(loaded.storage_data, dict):
        raise UserError(f"{path} is not the table of contents of a checkpoint; copy it again")
    try:
        contents = _contents(loaded, path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); copy the checkpoint again") from error
    _check_files(folder, contents)
    return contents


def _contents(loaded: dcp.Metadata, path: Path) -> Contents:
    storage = {(index.fqn, index.offset): info for index, info in loaded.storage_data.items()}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for key, entry in loaded.state_dict_metadata.items():
        if isinstance(entry, dcp.BytesStorageMetadata):
            info = storage[key, None]
            objects[key] = StoredObject(info.relative_path, info.offset, info.length)
            continue
        chunks = []
        for stored in entry.chunks:
            start = tuple(stored.offsets)
            box = Box(start, tuple(a + n for a, n in zip(start, stored.sizes, strict=True)))
            if (info := storage.get((key, stored.offsets))) is None:
                raise UserError(f"{path} does not say where the chunk of {key} at {list(start)} is; save it again")
            if info.transform_descriptors:
                raise UserError(f"{path} says that {key} is stored as {info.transform_descriptors}; save it plainly")
            chunks.append(Chunk(box, info.relative_path, info.offset, info.length))
        tensors[key] = StoredTensor(tuple(entry.size), entry.properties.dtype, chunks)
    return Contents(tensors, objects)


def _check_files(folder: Path, contents: Contents) -> None:
    ends: dict[str, int] = {}
    pieces: list[Chunk | StoredObject] = [chunk for tensor in contents.tensors.values() for chunk in tensor.chunks]
    pieces += contents.objects.values()
    for piece in pieces:
        ends[piece.file] = max(ends.get(piece.file, 0), piece.offset + piece.length)
        if piece.offset < 0 or piece.length < 0:
            raise UserError(f"{folder / METADATA} is damaged: a chunk begins at {piece.offset}; copy it again")
    for file, end in ends.items():
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts:
            raise UserError(f"{folder / METADATA} names {file}, which leads out of the folder")
        if not (folder / relative).is_file():
            raise UserError(f"{folder / METADATA} names {file}, which is missing; copy it again")
        if (size := (folder / relative).stat().st_size) < end:
            raise UserError(f"{folder / file} is truncated: it has {size} bytes of {end}; copy it again")


def write_metadata(folder: Path, contents: Contents) -> None:
    """Write `.metadata` for chunks that are in their files."""
    entries: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for key, tensor in contents.tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            offsets = torch.Size(chunk.box.start)
            chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(chunk.box.shape)))
            storage[dcp.MetadataIndex(key, offsets)] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        properties = dcp.TensorProperties(dtype=tensor.dtype)
        entries[key] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for key, stored in contents.objects.items():
        entries[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = _StorageInfo(stored.file, stored.offset, stored.length)
    loaded = dcp.Metadata(state_dict_metadata=entries, planner_data={}, storage_data=storage)
    (folder / METADATA).write_bytes(pickle.dumps(loaded))
