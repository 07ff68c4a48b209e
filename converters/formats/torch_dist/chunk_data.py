"""Finds the elements of a stored chunk in its archive, as written by `torch.save`."""

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from isal.isal_zlib import crc32

from converters.errors import UserError
from converters.formats.torch_dist.framing import DATA, PICKLE, STORAGES, frame
from converters.formats.torch_dist.unpickling import safe_load
from converters.layout import Shape

_SIGNATURE, _LOCAL_HEADER_BYTES = b"PK\3\4", 30
_NAME_LENGTH, _EXTRA_LENGTH = slice(26, 28), slice(28, 30)
_FIELD_HEADER_BYTES = 4
_CHECKSUM_BYTES = 4
_DAMAGE = (
    zipfile.BadZipFile,
    ArithmeticError,
    LookupError,
    ValueError,
    EOFError,
    OSError,
    NotImplementedError,
    struct.error,
)


class Content(Protocol):
    """A mapped file."""

    def __getitem__(self, part: slice, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ChunkData:
    """Contiguous elements of `dtype` and `shape` at byte `offset` of the file, with their checksum."""

    dtype: torch.dtype
    shape: Shape
    offset: int
    nbytes: int
    crc32: int
    """CRC-32 of the whole storage, `storage_bytes` long, from `storage_offset`: the chunk may be a part of it."""
    storage_offset: int
    storage_bytes: int


def locate(file: Content, offset: int, length: int, where: object) -> ChunkData:
    """Locate the elements of the archive at `offset` to `offset + length` of a mapped file.

    Raises UserError, naming `where`, for anything but a plain contiguous tensor written by torch.save.
    """
    try:
        archive = _Archive(file, offset, length)
        content = archive.read(PICKLE)
        storage_offset, data = archive.find(DATA)
    except _DAMAGE as error:
        raise UserError(f"{where} is damaged ({error}); copy the checkpoint again") from error
    tensor = safe_load(content, where, more=_REBUILD, persistent=_Storage)
    if not isinstance(tensor, _Tensor):
        raise UserError(f"{where} is no tensor as torch.save writes it; save the checkpoint again")
    itemsize = tensor.dtype.itemsize
    nbytes = torch.Size(tensor.shape).numel() * itemsize
    start = tensor.first * itemsize
    if not tensor.is_contiguous or start < 0 or start + nbytes > data.file_size:
        raise UserError(f"{where} is no contiguous tensor of its storage; save the checkpoint again")
    return ChunkData(
        tensor.dtype, tensor.shape, storage_offset + start, nbytes, data.CRC, storage_offset, data.file_size
    )  # fmt: skip


def locate_framed(file: Content, offset: int, length: int, dtype: torch.dtype, shape: Shape) -> ChunkData | None:
    """As `locate`, for a tensor framed exactly as `framing.frame` does; None if it is not.

    Much faster than reading an archive of unknown origin.
    """
    if dtype not in STORAGES.values() or (expected := frame(dtype, shape)).length != length:
        return None
    start, stop = offset + expected.head_bytes, offset + expected.head_bytes + expected.data_bytes
    at = offset + expected.checksum_offset
    checksum = int.from_bytes(file[at : at + _CHECKSUM_BYTES], "little")
    if (file[offset:start], file[stop : offset + length]) != expected.around(checksum):
        return None
    return ChunkData(dtype, shape, start, expected.data_bytes, checksum, start, expected.data_bytes)


def pickle_of_archive(file: Content, offset: int, length: int, where: object) -> bytes:
    """The pickle in an archive that torch.save wrote at `offset` of a file. Raises UserError if there is none."""
    try:
        return _Archive(file, offset, length).read(PICKLE)
    except _DAMAGE as error:
        raise UserError(f"{where} is damaged ({error}); copy the checkpoint again") from error


class _Archive:
    """The records of an archive at `offset` to `offset + length` of a mapped file, all of them uncompressed."""

    def __init__(self, file: Content, offset: int, length: int) -> None:
        self._file, self._offset, self._end = file, offset, offset + length
        with zipfile.ZipFile(_Window(file, offset, length)) as archive:
            infos = archive.infolist()
        self._records = {info.filename.partition("/")[2]: info for info in infos}

    def find(self, name: str) -> tuple[int, zipfile.ZipInfo]:
        """The offset in the file of a record's content, and the record's entry in the archive's directory.

        Raises ValueError if the record is missing, damaged or compressed.
        """
        if (info := self._records.get(name)) is None:
            raise ValueError(f"it has no {name}")
        start = self._offset + info.header_offset
        header = self._file[start : start + _LOCAL_HEADER_BYTES]
        name_bytes, extra_bytes = (int.from_bytes(header[part], "little") for part in (_NAME_LENGTH, _EXTRA_LENGTH))
        middle = start + _LOCAL_HEADER_BYTES + name_bytes
        begin = middle + extra_bytes
        found = self._file[middle - name_bytes : middle] == info.orig_filename.encode()
        if not found or not header.startswith(_SIGNATURE) or not _is_list_of_fields(self._file[middle:begin]):
            raise ValueError(f"the header of {name} is none")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"{name} is compressed")
        if begin + info.file_size > self._end:
            raise ValueError(f"{name} leads out of it")
        return begin, info

    def read(self, name: str) -> bytes:
        """The content of a record. Verifies its checksum, unless it is 0, which torch writes for none.

        Raises ValueError as `find`, and for a wrong checksum.
        """
        begin, info = self.find(name)
        content = self._file[begin : begin + info.file_size]
        if info.CRC and crc32(content) != info.CRC:
            raise ValueError(f"{name} has another checksum")
        return content


def _is_list_of_fields(extra: bytes) -> bool:
    """Whether a header's extra fields, each prefixed by kind and length, end exactly at the header's end."""
    position = 0
    while position + _FIELD_HEADER_BYTES <= len(extra):
        position += _FIELD_HEADER_BYTES + int.from_bytes(extra[position + 2 : position + 4], "little")
    return position == len(extra)


class _Window(io.RawIOBase):
    """A part of a mapped file as a file."""

    def __init__(self, file: Content, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise ValueError(f"the archive's directory leads to byte {origin + offset}")
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        stop = self._length if size < 0 else min(self._position + size, self._length)
        content = self._file[self._offset + self._position : self._offset + stop] if stop > self._position else b""
        self._position += len(content)
        return content


class _Storage:
    """Reference of a pickled tensor to its storage: `("storage", class, key, location, elements)`."""

    def __init__(self, identity: Any) -> None:
        kind, self.dtype, self.key, *_ = identity
        if kind != "storage" or not isinstance(self.dtype, torch.dtype) or f"data/{self.key}" != DATA:
            raise ValueError(f"it has the storage {identity}")


class _Tensor:
    """Description of a pickled tensor; stands in for torch's `_rebuild_tensor_v2`."""

    def __init__(self, storage: _Storage, first: int, shape: Any, stride: Any, *_: Any) -> None:
        self.dtype = storage.dtype
        self.first = int(first)
        self.shape: Shape = tuple(map(int, shape))
        self.is_contiguous = _is_contiguous(self.shape, tuple(map(int, stride)))


def _is_contiguous(shape: Shape, stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


_REBUILD: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}
