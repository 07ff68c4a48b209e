"""The manifest's content: checksums of every tensor or chunk, of every small file, and of the manifest itself."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from converters.errors import UserError
from converters.output_folder import WORKING_FILES
from converters.stream.journal import checksum
from converters.stream.targets import Written

MANIFEST = "megarl_manifest.json"
_VERSION = 2
_SEAL = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')
"""The beginning of a manifest: the CRC-32 of everything after it."""


@dataclass(frozen=True)
class Manifest:
    """Files and checksums of a folder as it was written. Paths are relative to the folder."""

    tensors: Mapping[str, Sequence[Written]]
    """Name of a tensor or chunk -> its place and CRC-32; a second place is that of its scales."""
    between: Mapping[str, Written]
    """File with tensors -> its size, and the CRC-32 of all bytes outside tensors: headers and frames."""
    files: Mapping[str, Written]
    """All other files, whole."""
    source: Mapping[str, Any]
    """Where the checkpoint comes from."""

    @property
    def data_files(self) -> set[str]:
        """The files that contain tensors."""
        return {place.file for places in self.tensors.values() for place in places}


def write_manifest(
    folder: Path,
    tensors: Mapping[str, Sequence[Written]],
    source: Mapping[str, Any],
    known: Sequence[Written] = (),
) -> None:
    """Write the manifest of a folder in which everything else is already written.

    Reads all files without tensors to compute their checksums, except those that are `known`, whole.
    """
    whole = {each.file: each for each in known}
    data_files: dict[str, list[Written]] = {}
    for places in tensors.values():
        for place in places:
            data_files.setdefault(place.file, []).append(place)
    others = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name not in data_files and name not in (MANIFEST, *WORKING_FILES):
            others[name] = whole.get(name) or _whole(path, name)
    content = {
        "version": _VERSION,
        "checksum": "crc32",
        "source": dict(source),
        "tensors": {name: [each.as_list() for each in places] for name, places in sorted(tensors.items())},
        "between": {name: around(folder, name, places).as_list() for name, places in sorted(data_files.items())},
        "files": {name: each.as_list() for name, each in others.items()},
    }
    (folder / MANIFEST).write_bytes(sealed(content))


def sealed(content: Mapping[str, Any]) -> bytes:
    """Encode a table as JSON that begins with its own checksum."""
    rest = f"{json.dumps(content, separators=(',', ':'))[1:]}\n".encode()
    return b'{"crc32":"%08x",' % crc32(rest) + rest


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None if there is none. Raises UserError if it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    raw = path.read_bytes()
    seal = _SEAL.match(raw)
    if seal is None or crc32(raw[seal.end() :]) != int(seal.group(1), 16):
        raise UserError(f"{path} is damaged: it does not have the checksum that it begins with; copy it again")
    try:
        content = json.loads(raw)
        return Manifest(
            {name: [Written.from_list(place) for place in places] for name, places in content["tensors"].items()},
            {name: Written.from_list(place) for name, place in content["between"].items()},
            {name: Written.from_list(place) for name, place in content["files"].items()},
            dict(content["source"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no manifest as megarl writes it ({error}); copy the checkpoint again") from error


def around(folder: Path, file: str, places: Iterable[Written]) -> Written:
    """The whole file `file`, but with the checksum of only the bytes around `places`, those of its tensors."""
    value: int | None = 0
    position = 0
    descriptor = os.open(folder / file, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        for start, stop in [*sorted((each.offset, each.offset + each.nbytes) for each in places), (size, size)]:
            # A file that ends before this place is already reported by its size.
            value = checksum(descriptor, position, start - position, value or 0)
            position = stop
    finally:
        os.close(descriptor)
    return Written(file, 0, size, value or 0)


def _whole(path: Path, name: str) -> Written:
    nbytes = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        value = checksum(descriptor, 0, nbytes)
    finally:
        os.close(descriptor)
    assert value is not None, f"{path} became shorter while it was read"
    return Written(name, 0, nbytes, value)
