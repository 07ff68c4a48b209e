"""Journal of the tensors written to an incomplete output, so that the same command can resume after an interruption."""

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
    """A file of lines: first what is being written, then one line per tensor written.

    Entries are trusted only if the bytes match: after a crash of the machine, the journal may be on disk without them.
    Use as a context manager.
    """

    def __init__(self, path: Path, purpose: Mapping[str, Any]) -> None:
        """`purpose` identifies an output; a journal of another purpose is started over."""
        self._path, self._start = path, f"{json.dumps(purpose, sort_keys=True)}\n".encode()
        self.found: dict[str, list[Written]] = {}
        """The tensors that an interrupted run wrote, by name."""
        self._file: FileIO

    def __enter__(self) -> "Journal":
        content = self._content()
        end = len(self._start) if self.is_begun else 0
        for line in content[end:].splitlines(keepends=True) if end else ():
            if (entry := _entry(line)) is None:
                break
            self.found[entry[0]] = entry[1]
            end += len(line)
        # Unbuffered: a buffer would be flushed again after a full disk has ended the run.
        self._file = self._path.open("r+b" if self._path.exists() else "w+b", buffering=0)
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._write(self._start)
        return self

    @property
    def is_begun(self) -> bool:
        """Whether the file has this purpose."""
        return self._content().startswith(self._start)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, name: str, written: Sequence[Written]) -> None:
        """Record that a tensor has been written."""
        line = [name, *(each.as_list() for each in written)]
        self._write(f"{json.dumps(line)}\n".encode())

    def _content(self) -> bytes:
        return self._path.read_bytes() if self._path.exists() else b""

    def _write(self, content: bytes) -> None:
        while content:
            content = content[self._file.write(content) :]


def _entry(line: bytes) -> tuple[str, list[Written]] | None:
    """Parse a tensor's name and places; None for a truncated or damaged line."""
    try:
        name, *places = json.loads(line)
        written = [Written.from_list(place) for place in places]
        return (name, written) if line.endswith(b"\n") and isinstance(name, str) else None
    except (TypeError, ValueError):
        return None


def is_intact(folder: Path, written: Written) -> bool:
    """Whether the bytes below `folder` have the recorded checksum."""
    try:
        descriptor = os.open(folder / written.file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return checksum(descriptor, written.offset, written.nbytes) == written.crc32
    finally:
        os.close(descriptor)


def checksum(descriptor: int, offset: int, nbytes: int, value: int = 0) -> int | None:
    """The CRC-32 of part of a file, continued from `value`; None if the file ends too early."""
    end = offset + nbytes
    while offset < end:
        content = os.pread(descriptor, min(_READ_BYTES, end - offset), offset)
        if not content:
            return None
        value = crc32(content, value)
        offset += len(content)
    return value
