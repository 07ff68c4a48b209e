"""Journal of the tensors written to an incomplete output, so that the same command can go on after an interruption."""

import json
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from converters.stream.targets import Written

_READ_BYTES = 2**20


class Journal:
    """A file of lines: what is being written, then each tensor that is.

    Nothing of it is believed without the bytes: after a crash of the machine the journal may be on disk and they not.
    Use as a context manager.
    """

    def __init__(self, path: Path, purpose: Mapping[str, Any]) -> None:
        """`purpose` tells one output from another; a journal of another purpose is started over."""
        self._path, self._start = path, f"{json.dumps(purpose, sort_keys=True)}\n".encode()
        self.found: dict[str, list[Written]] = {}
        """Tensors that an interrupted run wrote, by name."""
        self._file: FileIO

    def __enter__(self) -> "Journal":
        content = self._content()
        end = len(self._start) if self.is_begun else 0
        for line in content[end:].splitlines(keepends=True) if end else ():
            if (entry := _entry(line)) is None:
                break
            self.found[entry[0]] = entry[1]
            end += len(line)
        # Without a buffer, which would want to be written again when a full disk ends the run.
        self._file = self._path.open("r+b" if self._path.exists() else "w+b", buffering=0)
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._write(self._start)
        return self

    @property
    def is_begun(self) -> bool:
        """Whether the file is of this purpose."""
        return self._content().startswith(self._start)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, written: Sequence[Written]) -> None:
        """Note that a tensor has been written."""
        line = [name, *(each.as_list() for each in written)]
        self._write(f"{json.dumps(line)}\n".encode())

    def _content(self) -> bytes:
        return self._path.read_bytes() if self._path.exists() else b""

    def _write(self, content: bytes) -> None:
        while content:
            content = content[self._file.write(content) :]


def _entry(line: bytes) -> tuple[str, list[Written]] | None:
    """A tensor's name and places; None for a line that was cut off or damaged."""
    try:
        name, *places = json.loads(line)
        written = [Written.from_list(place) for place in places]
        return (name, written) if line.endswith(b"\n") and isinstance(name, str) else None
    except (TypeError, ValueError):
        return None


def is_intact(folder: Path, written: Written) -> bool:
    """Whether the bytes below `folder` have the checksum that was noted."""
    try:
        descriptor = os.open(folder / written.file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return checksum(descriptor, written.offset, written.nbytes) == written.crc32
    finally:
        os.close(descriptor)


def checksum(descriptor: int, offset: int, nbytes: int, value: int = 0) -> int | None:
    """The CRC-32 of a part of a file, continued from `value`; None if the file ends too early."""
    end = offset + nbytes
    while offset < end:
        content = os.pread(descriptor, min(_READ_BYTES, end - offset), offset)
        if not content:
            return None
        value = crc32(content, value)
        offset += len(content)
    return value
