"""Verifies the checksums that torch stores for every record of its archives."""

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from converters.errors import UserError
from converters.formats.torch_dist import COMMON, Chunk, StoredObject, TorchDistCheckpoint


@dataclass
class ChunkRecord:
    """The elements of a chunk of a torch_dist checkpoint."""

    checkpoint: TorchDistCheckpoint
    key: str
    chunk: Chunk
    has_checksum: bool = True
    """Known when `damage` has been called."""

    @property
    def file(self) -> str:
        """The file that has it."""
        return self.chunk.file

    @property
    def nbytes(self) -> int:
        """Size of the archive."""
        return self.chunk.length

    def damage(self) -> str | None:
        """Names what is damaged; None if nothing is."""
        try:
            content, expected = self.checkpoint.checksum_data(self.key, self.chunk)
        except UserError as error:
            return str(error)
        # torch writes 0 where `torch.serialization.set_crc32_options` turned checksums off.
        self.has_checksum = bool(expected or not len(content))
        if not self.has_checksum or crc32(content) == expected:
            return None
        return f"the chunk of {self.key} at {list(self.chunk.box.start)} in {self.chunk.file}"


@dataclass
class ObjectRecord:
    """A non-tensor object of a torch_dist checkpoint, or its common.pt."""

    folder: Path
    key: str
    stored: StoredObject
    has_checksum: bool = True
    """Known when `damage` has been called."""

    @property
    def file(self) -> str:
        """The file that has it."""
        return self.stored.file

    @property
    def nbytes(self) -> int:
        """Size of the archive."""
        return self.stored.length

    def damage(self) -> str | None:
        """Names what is damaged; None if nothing is."""
        with (self.folder / self.stored.file).open("rb") as file:
            file.seek(self.stored.offset)
            content = file.read(self.stored.length)
        damaged = f"the object {self.key} in {self.stored.file}"
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                filled = [info for info in archive.infolist() if info.file_size]
                self.has_checksum = any(info.CRC for info in filled) or not filled
                return damaged if self.has_checksum and archive.testzip() else None
        except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError):
            return damaged


Record = ChunkRecord | ObjectRecord


def records_of(checkpoint: TorchDistCheckpoint) -> Iterator[Record]:
    """All records of a checkpoint, including optimizer state; an object shared by several keys appears once."""
    for key, tensor in checkpoint.contents.tensors.items():
        for chunk in tensor.chunks:
            yield ChunkRecord(checkpoint, key, chunk)
    shared = {stored: key for key, stored in checkpoint.contents.objects.items()}
    for stored, key in shared.items():
        yield ObjectRecord(checkpoint.folder, key, stored)
    common = checkpoint.folder / COMMON
    if common.is_file():
        yield ObjectRecord(checkpoint.folder, COMMON, StoredObject(COMMON, 0, common.stat().st_size))
