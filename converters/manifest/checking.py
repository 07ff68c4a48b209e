"""Verifies that the files of a manifest still have the bytes that were written."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from converters.errors import UserError
from converters.manifest.content import MANIFEST, Manifest, around
from converters.stream.journal import is_intact
from converters.stream.targets import Written


class Check(Protocol):
    """A comparison of part of a file with its recorded checksum."""

    @property
    def file(self) -> str:
        """The file that is read, relative to the folder."""

    @property
    def key(self) -> str:
        """Name of the tensor, chunk or object; "" if it is none of these."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor or small file; 0 for the bytes around tensors."""

    def damage(self) -> str | None:
        """The name of what is damaged; None if it is intact. Called in a thread."""


def damages(checks: Sequence[Check], *, workers: int, on_bytes: Callable[[int], None]) -> list[str]:
    """Describe all damage, in the order of the checks. Several threads call `on_bytes` with the bytes they read."""

    def work(check: Check) -> str | None:
        damage = check.damage()
        on_bytes(check.nbytes)
        return damage

    with ThreadPoolExecutor(workers) as pool:
        return [damage for damage in pool.map(work, checks) if damage]


def missing_files(root: Path, manifest: Manifest) -> list[str]:
    """The manifest's files that do not exist."""
    return sorted(name for name in manifest.data_files | manifest.files.keys() if not (root / name).is_file())


def checks_of(root: Path, manifest: Manifest) -> list[Check]:
    """Checks of the files that exist: one per tensor, one per file for the bytes around tensors, one per small file."""
    places: dict[str, list[Written]] = {file: [] for file in manifest.data_files}
    checks: list[Check] = []
    for name, each in manifest.tensors.items():
        for place in each:
            places[place.file].append(place)
            checks.append(_Piece(root, name, f"{name} in {place.file}", place))
    checks += [_File(root, place) for place in manifest.files.values()]
    checks += [_Frame(root, places.get(file, []), expected) for file, expected in manifest.between.items()]
    missing = set(missing_files(root, manifest))
    return [check for check in checks if check.file not in missing]


def require_files(root: Path, manifest: Manifest, *, but_below: str | None = None, frames: bool = False) -> None:
    """Raise UserError unless files with tensors have the recorded sizes, and all other files are intact.

    With `frames`, the bytes around the tensors are compared, too. The folder `but_below` is not checked.
    """
    places: dict[str, list[Written]] = {}
    for place in (place for each in manifest.tensors.values() for place in each) if frames else ():
        places.setdefault(place.file, []).append(place)
    for name, written in {**manifest.between, **manifest.files}.items():
        if but_below and name.startswith(f"{but_below}/"):
            continue
        path = root / name
        if not path.is_file():
            raise UserError(f"{path} is missing, which is in {root / MANIFEST}; copy the checkpoint again")
        if name in manifest.files:
            is_right = _is_whole(root, written)
        elif frames:
            is_right = around(root, name, places.get(name, [])) == written
        else:
            is_right = path.stat().st_size == written.nbytes
        if not is_right:
            raise UserError(f"{path} is not the file that {root / MANIFEST} has the checksum of; copy it again")


@dataclass(frozen=True)
class _Piece:
    """A tensor."""

    root: Path
    key: str
    name: str
    expected: Written

    @property
    def file(self) -> str:
        return self.expected.file

    @property
    def nbytes(self) -> int:
        return self.expected.nbytes

    def damage(self) -> str | None:
        return None if is_intact(self.root, self.expected) else self.name


@dataclass(frozen=True)
class _File:
    """A small file."""

    root: Path
    expected: Written
    key: str = ""

    @property
    def file(self) -> str:
        return self.expected.file

    @property
    def nbytes(self) -> int:
        return self.expected.nbytes

    def damage(self) -> str | None:
        return None if _is_whole(self.root, self.expected) else self.file


def _is_whole(root: Path, written: Written) -> bool:
    return (root / written.file).stat().st_size == written.nbytes and is_intact(root, written)


@dataclass(frozen=True)
class _Frame:
    """The bytes of a file around its tensors: headers and frames."""

    root: Path
    places: Sequence[Written]
    expected: Written
    key: str = ""
    nbytes: int = 0

    @property
    def file(self) -> str:
        return self.expected.file

    def damage(self) -> str | None:
        if around(self.root, self.file, self.places) == self.expected:
            return None
        return f"{self.file}, in its length or around its tensors"
