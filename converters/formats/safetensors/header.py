"""The safetensors format: an 8-byte little-endian length, a JSON header of that length, the tensors' bytes.

Specification: https://github.com/huggingface/safetensors#format
"""

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import torch

from converters.errors import UserError
from converters.formats.mapped_file import MappedFile
from converters.layout import Shape

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_GIT_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file; `offset` counts bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file.

    Raises UserError for a file that is truncated, too long or a Git LFS pointer, or whose header is broken, or has a
    duplicate tensor or an unknown dtype.
    """
    try:
        size, file = path.stat().st_size, path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); change that or copy it again") from error
    with file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or header_bytes > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            file.seek(0)
            if file.read(len(_GIT_LFS_POINTER)) == _GIT_LFS_POINTER:
                raise UserError(f"{path} is only Git LFS's pointer to the file; run git lfs pull in its folder")
            raise UserError(f"{path} is truncated, or no safetensors file: its header does not fit; copy it again")
        raw = file.read(header_bytes)
    entries = _parse(path, raw, data_start=_LENGTH_BYTES + header_bytes)
    end = _LENGTH_BYTES + header_bytes
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise UserError(f"{path} has a broken header: the bytes of {name} do not follow those of the tensor before")
        end += entry.nbytes
    if size != end:
        state = "is truncated" if size < end else "is too long"
        raise UserError(f"{path} {state}: it has {size} bytes, its header describes {end}; copy it again")
    return entries


def _parse(path: Path, raw: bytes, data_start: int) -> dict[str, TensorEntry]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path} holds {twice} twice; write the file again")
        return seen

    try:
        header = json.loads(raw, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} has a header that is not JSON ({error}); copy the file again") from error
    if not isinstance(header, dict):
        raise UserError(f"{path} has a header that is not a JSON object; copy the file again")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, data_start) for name, fields in header.items()}


def _entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    if isinstance(fields, dict) and isinstance(dtype := fields.get("dtype"), str) and dtype not in DTYPES:
        raise UserError(f"{path} holds {name} in {dtype[:20]}, which is not read here; give the model in bf16")
    try:
        shape, (start, stop) = tuple(map(index, fields["shape"])), map(index, fields["data_offsets"])
        entry = TensorEntry(DTYPES[fields["dtype"]], shape, data_start + start)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} has a broken header: {name} is described by {fields!r}") from error
    if min(shape, default=0) < 0 or start < 0 or stop - start != entry.nbytes:
        raise UserError(f"{path} has a broken header: {name} is described by {fields!r}")
    return entry


def place_tensors(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the beginning of a file with these tensors, up to their bytes, and the tensors' offsets.

    Tensors are ordered by descending element size, then by name, so that each is aligned to its elements.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name in sorted(shapes, key=lambda name: (-dtypes[name].itemsize, name)):
        entry = entries[name] = TensorEntry(dtypes[name], shapes[name], position)
        header[name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT_BYTES)
    start = len(raw).to_bytes(_LENGTH_BYTES, "little") + raw
    return start, {name: replace(entry, offset=len(start) + entry.offset) for name, entry in entries.items()}


def map_tensors(path: Path, entries: Mapping[str, TensorEntry], *, writable: bool) -> dict[str, torch.Tensor]:
    """Views of the tensors in the memory-mapped file. Pages are read when touched.

    With `writable`, writes to a view go to the file, from every process that maps it; otherwise views must not be
    written.
    """
    data = _writable(path) if writable else MappedFile(path).tensor(0, path.stat().st_size)
    views = {}
    for name, entry in entries.items():
        tensor_bytes = data[entry.offset : entry.offset + entry.nbytes]
        if entry.offset % entry.dtype.itemsize:
            # The format allows misaligned tensors, but torch has no views of them.
            tensor_bytes = tensor_bytes.clone()
        views[name] = tensor_bytes.view(entry.dtype).view(entry.shape)
    return views


def _writable(path: Path) -> torch.Tensor:
    """Map a file, which stays open as long as its mapping: NFS flushes what was written when a file is closed."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE), dtype=torch.uint8)
