"""One tensor as framed by `torch.save`: a zip archive with the elements, uncompressed and contiguous.

The zip archive's CRC-32 of the elements, which torch does not verify, is the checksum of a chunk. Specifications:
APPNOTE 6.3.10 of PKWARE for the archive, `torch.serialization` for what is in it.
"""

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from isal.isal_zlib import crc32

from converters.layout import Shape

STORAGES: dict[str, torch.dtype] = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
}
"""Name of torch's storage class, as pickled -> type of its elements."""
_CLASSES = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}

PICKLE, DATA = "data.pkl", "data/0"
_FOLDER = "archive/"
_ALIGNMENT_BYTES = 64

_LOCAL, _CENTRAL = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
_END_64, _LOCATOR_64, _END = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL"), struct.Struct("<4s4H2LH")
_CRC_OFFSET = 14  # in a local header
_ZIP64, _PADDING = 1, 0x4246  # kinds of extra fields; torch pads with the second
_VERSION, _VERSION_64 = 20, 45
_MAX_32 = 0xFFFF_FFFF
_DATE = 0x21  # 1980-01-01, the earliest


@dataclass(frozen=True)
class _Record:
    name: bytes
    offset: int
    size: int
    crc32: int

    @property
    def is_large(self) -> bool:
        return self.size >= _MAX_32

    def _fields(self) -> tuple[int, int, bytes]:
        """Version, 32-bit size, and 64-bit sizes if 32 bits are not enough."""
        if self.is_large:
            return _VERSION_64, _MAX_32, struct.pack("<2H2Q", _ZIP64, 16, self.size, self.size)
        return _VERSION, self.size, b""

    def local_header(self) -> bytes:
        """Header before the content, padded so that the content is aligned."""
        version, size, extra = self._fields()
        end = self.offset + _LOCAL.size + len(self.name) + len(extra) + 4
        padding = -end % _ALIGNMENT_BYTES
        extra += struct.pack("<2H", _PADDING, padding) + b"Z" * padding
        start = _LOCAL.pack(
            b"PK\3\4", version, 0, 0, 0, _DATE, self.crc32, size, size, len(self.name), len(extra)
        )  # fmt: skip
        return start + self.name + extra

    def central_header(self) -> bytes:
        """The record's entry in the archive's directory."""
        version, size, extra = self._fields()
        start = _CENTRAL.pack(
            b"PK\1\2", version, version, 0, 0, 0, _DATE, self.crc32, size, size,
            len(self.name), len(extra), 0, 0, 0, 0, self.offset,
        )  # fmt: skip
        return start + self.name + extra


@dataclass(frozen=True)
class Frame:
    """The bytes before and after a tensor's elements; both include the elements' checksum."""

    head_bytes: int
    data_bytes: int
    length: int
    """Size of the whole archive, in bytes."""
    around: Callable[[int], tuple[bytes, bytes]]
    """Head and tail for elements with this CRC-32."""
    checksum_offset: int
    """Where in the head the CRC-32 is, in 4 bytes, little-endian."""


@lru_cache(maxsize=256)
def frame(dtype: torch.dtype, shape: Shape) -> Frame:
    """The frame of a contiguous tensor. Raises KeyError for a dtype without a torch storage class."""
    small = {PICKLE: _pickled(dtype, shape), "byteorder": b"little", "version": b"3\n"}
    records: list[_Record] = []
    start = b""
    for name, content in small.items():
        record = _Record((_FOLDER + name).encode(), len(start), len(content), crc32(content))
        records.append(record)
        start += record.local_header() + content
    data_bytes = math.prod(shape) * dtype.itemsize

    def around(checksum: int) -> tuple[bytes, bytes]:
        data = _Record((_FOLDER + DATA).encode(), len(start), data_bytes, checksum)
        head = start + data.local_header()
        return head, _directory([*records, data], offset=len(head) + data_bytes)

    head, tail = around(0)
    return Frame(len(head), data_bytes, len(head) + data_bytes + len(tail), around, len(start) + _CRC_OFFSET)


def _directory(records: list[_Record], offset: int) -> bytes:
    lines = b"".join(record.central_header() for record in records)
    count, end = len(records), offset + len(lines)
    large = b""
    if offset >= _MAX_32:
        large = _END_64.pack(b"PK\6\6", 44, _VERSION_64, _VERSION_64, 0, 0, count, count, len(lines), offset)
        large += _LOCATOR_64.pack(b"PK\6\7", 0, end, 1)
    return lines + large + _END.pack(b"PK\5\6", 0, 0, count, count, len(lines), min(offset, _MAX_32), 0)


def _pickled(dtype: torch.dtype, shape: Shape) -> bytes:
    """The archive's pickle: a tensor of `shape` over the archive's storage 0."""
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=2)
    pickler.dump(_Tensor((_Storage(dtype, math.prod(shape)), 0, shape, stride, False, OrderedDict())))
    return buffer.getvalue()


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True)
class _Tensor:
    arguments: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", _CLASSES[value.dtype], "0", "cpu", value.elements
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _Tensor):
            return torch._utils._rebuild_tensor_v2, value.arguments
        return NotImplemented
