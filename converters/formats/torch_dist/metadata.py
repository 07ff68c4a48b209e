"""`.metadata`, the table of contents of a torch_dist checkpoint."""

import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
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
    """A box of a tensor, stored separately at `offset` to `offset + length` of a file."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its key: its unsharded shape, and its chunks."""

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
    """Entries of a checkpoint, by key."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]


def read_metadata(folder: Path) -> Contents:
    """The contents of the checkpoint in `folder`. No code of the file runs.

    Raises UserError if `.metadata` is missing, damaged or inconsistent, names a file that is missing or outside of the
    folder, or if a file is shorter than its chunks.
    """
    path = folder / METADATA
    loaded = load_metadata(folder)
    try:
        contents = _contents(loaded, path)
        for key, tensor in contents.tensors.items():
            _check_tensor(key, tensor)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); copy the checkpoint again") from error
    _check_files(folder, contents)
    return contents


def load_metadata(folder: Path) -> dcp.Metadata:
    """Load `.metadata` as torch's class, without running code of the file.

    Raises UserError if it is missing or invalid.
    """
    path = folder / METADATA
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {METADATA}; give the folder of a complete torch_dist checkpoint") from error
    loaded = safe_load(content, path)
    if not isinstance(loaded, dcp.Metadata) or not isinstance(loaded.storage_data, dict):
        raise UserError(f"{path} is not the table of contents of a checkpoint; copy it again")
    return loaded


def _check_tensor(key: str, tensor: StoredTensor) -> None:
    """Raise ValueError for chunks that exceed their tensor, and for anything that is not a tensor."""
    if not isinstance(key, str) or not isinstance(tensor.dtype, torch.dtype) or min(tensor.shape, default=0) < 0:
        raise ValueError(f"{key} has the shape {list(tensor.shape)} and the type {tensor.dtype}")
    for chunk in tensor.chunks:
        pairs = zip(chunk.box.start, chunk.box.stop, tensor.shape, strict=True)
        if not all(0 <= start <= stop <= length for start, stop, length in pairs):
            raise ValueError(f"{key} of shape {list(tensor.shape)} has a chunk at {chunk.box}")


def _contents(loaded: dcp.Metadata, path: Path) -> Contents:
    storage = {(place.fqn, place.offset): info for place, info in loaded.storage_data.items()}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for key, entry in loaded.state_dict_metadata.items():
        if isinstance(entry, dcp.BytesStorageMetadata):
            info = storage[key, None]
            objects[key] = StoredObject(*_piece(info))
            continue
        chunks = []
        for stored in entry.chunks:
            start = tuple(map(index, stored.offsets))
            box = Box(start, tuple(a + index(n) for a, n in zip(start, stored.sizes, strict=True)))
            if (info := storage.get((key, stored.offsets))) is None:
                raise UserError(f"{path} does not say where the chunk of {key} at {list(start)} is; save it again")
            if info.transform_descriptors:
                raise UserError(f"{path} says that {key} is stored as {info.transform_descriptors}; save it plainly")
            chunks.append(Chunk(box, *_piece(info)))
        tensors[key] = StoredTensor(tuple(map(index, entry.size)), entry.properties.dtype, chunks)
    return Contents(tensors, objects)


def _piece(info: Any) -> tuple[str, int, int]:
    """File, offset and length of a chunk or object. Raises TypeError or ValueError for invalid ones."""
    file, offset, length = info.relative_path, index(info.offset), index(info.length)
    if not isinstance(file, str) or offset < 0 or length <= 0:
        raise ValueError(f"a chunk in {file} begins at {offset} and has {length} bytes")
    return file, offset, length


def _check_files(folder: Path, contents: Contents) -> None:
    chunks = [(chunk, key) for key, tensor in contents.tensors.items() for chunk in tensor.chunks]
    ends: dict[str, int] = {}
    for chunk, key in sorted(chunks, key=lambda pair: (pair[0].file, pair[0].offset)):
        if chunk.offset < ends.get(chunk.file, 0):
            raise UserError(
                f"{folder / METADATA} is damaged: two chunks, one of {key}, share bytes of {chunk.file}; copy it again"
            )
        ends[chunk.file] = chunk.offset + chunk.length
    for each in contents.objects.values():
        ends[each.file] = max(ends.get(each.file, 0), each.offset + each.length)
    for file, end in ends.items():
        relative = PurePosixPath(file)
        if relative.is_absolute() or ".." in relative.parts:
            raise UserError(f"{folder / METADATA} names {file}, which leads out of the folder")
        if not os.path.isfile(folder / relative):
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
