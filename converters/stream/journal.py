"""What has been written of an output that is not complete, so that the same command can go on after an interruption."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from isal.isal_zlib import crc32

from converters.stream.targets import Written

_READ_BYTES = 2**20


class Journal:
    """A file of lines: what is being written, then each tensor that is.

    Nothing of it is believed without the bytes: after a crash of the machine the journal may be on disk and they not.
    Use as a context manager.
    """

    def __init__(self, path: Path, purpose: Mapping[str, Any]) -> None:
        """`purpose` tells one output from another; a journal of another purpose is begun anew."""
        self._path, self._purpose = path, json.dumps(purpose, sort_keys=True)
        self.found: dict[str, list[Written]] = {}
        """Tensors that an interrupted run wrote, by name."""
        self._file: TextIO

    def __enter__(self) -> "Journal":
        lines = self._path.read_text().split("\n") if self._path.exists() else []
        if lines and lines[0] == self._purpose:
            # What follows the last newline was cut off.
            for line in lines[1:-1]:
                name, *places = json.loads(line)
                self.found[name] = [Written(*place) for place in places]
            self._truncate("\n".join(lines[:-1]) + "\n")
        else:
            self._truncate(self._purpose + "\n")
        self._file = self._path.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _truncate(self, content: str) -> None:
        self._path.write_text(content)

    def add(self, name: str, written: Sequence[Written]) -> None:
        """Note that a tensor has been written."""
        line = [name, *([each.file, each.offset, each.nbytes, each.crc32] for each in written)]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


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


def checksum(descriptor: int, offset: int, nbytes: int) -> int | None:
    """The CRC-32 of a part of a file; None where the file ends before."""
    value, end = 0, offset + nbytes
    while offset < end:
        content = os.pread(descriptor, min(_READ_BYTES, end - offset), offset)
        if not content:
            return None
        value = crc32(content, value)
        offset += len(content)
    return value
