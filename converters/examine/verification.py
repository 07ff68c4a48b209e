"""Whether a checkpoint still has the bytes that were written: its checksums."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from converters.errors import UserError
from converters.examine.counting import Count
from converters.examine.opening import open_checkpoint
from converters.examine.records import records_of
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import LATEST, TorchDistCheckpoint
from converters.manifest import MANIFEST, Manifest, around, read_manifest
from converters.stream.journal import checksum
from converters.stream.run import Progress
from converters.stream.targets import Written


@dataclass(frozen=True)
class Verification:
    """What the checksums say."""

    by_manifest: bool
    """Else by the checksums that torch wrote beside each chunk, which cover less: neither names nor shapes."""
    checked: int
    """Number of tensors, chunks and objects."""
    files: int
    nbytes: int
    """That were read."""
    damaged: Sequence[str]
    """What has other bytes than were written, and where."""
    missing: Sequence[str] = ()
    """Files of the manifest that are not there."""
    unlisted: Sequence[str] = ()
    """Files that are there and not in the manifest: nothing is known of them."""
    without_checksum: int = 0
    """Number of chunks and objects of which nothing is known but their structure."""

    @property
    def is_intact(self) -> bool:
        """Whether every byte with a checksum is as it was."""
        return not (self.damaged or self.missing)


class _Check(Protocol):
    """Something with a checksum."""

    @property
    def nbytes(self) -> int:
        """That are read to compare it."""

    def damage(self) -> str | None:
        """What is damaged, None where nothing is. Called in a thread."""


def verify(folder: Path, *, workers: int, progress: Progress) -> Verification:
    """Compare a checkpoint with its manifest, or else a torch_dist checkpoint with the checksums of its chunks.

    Raises UserError where there are no checksums, and where there is no checkpoint or, without a manifest, one that is
    damaged in its structure.
    """
    if found := _manifest_of(folder):
        return _by_manifest(*found, workers=workers, progress=progress)
    checkpoint = open_checkpoint(folder)
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        raise UserError(
            f"{folder} has no checksums, since megarl did not write it: only its structure could be checked, and its"
            f" {len(checkpoint.shapes)} tensors have the bytes that their headers promise"
        )
    return _by_records(checkpoint, workers=workers, progress=progress)


def _damages(checks: Sequence[_Check], workers: int, progress: Progress) -> list[str]:
    count = Count(sum(check.nbytes for check in checks), progress)

    def work(check: _Check) -> str | None:
        damage = check.damage()
        count.add(check.nbytes)
        return damage

    with ThreadPoolExecutor(workers) as pool:
        return [damage for damage in pool.map(work, checks) if damage]


def _manifest_of(folder: Path) -> tuple[Path, Manifest] | None:
    """The manifest that is about a folder, in it or in the one above, and where it is."""
    for root in (folder, folder.absolute().parent):
        manifest = read_manifest(root)
        if manifest and _newest(folder, root) in {
            "",
            *(PurePosixPath(file).parts[0] for file in _data_files(manifest)),
        }:
            return root, manifest
    return None


def _newest(folder: Path, root: Path) -> str:
    """The folder below `root` that `folder` stands for; "" for `root` itself."""
    if root != folder:
        return folder.name
    # Where a training run went on from a converted checkpoint, the manifest is about another one than the newest.
    tracker = root / LATEST
    latest = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    return f"iter_{int(latest):07d}" if latest.isdecimal() and (root / f"iter_{int(latest):07d}").is_dir() else ""


def _data_files(manifest: Manifest) -> set[str]:
    return {place.file for places in manifest.tensors.values() for place in places}


def _by_manifest(root: Path, manifest: Manifest, *, workers: int, progress: Progress) -> Verification:
    names = _data_files(manifest) | manifest.files.keys()
    for name in names:
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise UserError(f"{root / MANIFEST} names {name}, which leads out of the folder; copy the checkpoint again")
    missing = sorted(name for name in names if not (root / name).is_file())
    there = names.difference(missing)
    folders = {(root / name).parent for name in there}
    present = {str(path.relative_to(root)) for each in folders for path in each.iterdir() if path.is_file()}
    checks: list[_Check] = [
        _Whole(root, f"{name} in {place.file}", place)
        for name, places in manifest.tensors.items()
        for place in places
        if place.file in there
    ]
    checks += [_Whole(root, name, place) for name, place in manifest.files.items() if name in there]
    checks += [frame for frame in _frames(root, manifest) if frame.expected.file in there]
    return Verification(
        by_manifest=True,
        checked=len(manifest.tensors),
        files=len(there),
        nbytes=sum(check.nbytes for check in checks),
        damaged=_damages(checks, workers, progress),
        missing=missing,
        unlisted=sorted(present - names - {MANIFEST}),
    )


@dataclass(frozen=True)
class _Whole:
    """A tensor or a small file."""

    root: Path
    name: str
    expected: Written

    @property
    def nbytes(self) -> int:
        return self.expected.nbytes

    def damage(self) -> str | None:
        descriptor = os.open(self.root / self.expected.file, os.O_RDONLY)
        try:
            found = checksum(descriptor, self.expected.offset, self.expected.nbytes)
        finally:
            os.close(descriptor)
        return None if found == self.expected.crc32 else self.name


@dataclass(frozen=True)
class _Frame:
    """The bytes of a file around its tensors: headers and frames."""

    root: Path
    places: Sequence[Written]
    expected: Written
    nbytes: int = 0

    def damage(self) -> str | None:
        if around(self.root, self.expected.file, self.places) == self.expected:
            return None
        return f"{self.expected.file}, in its length or around its tensors"


def _frames(root: Path, manifest: Manifest) -> Iterator[_Frame]:
    places: dict[str, list[Written]] = {file: [] for file in _data_files(manifest)}
    for each in manifest.tensors.values():
        for place in each:
            places[place.file].append(place)
    for file, expected in manifest.between.items():
        yield _Frame(root, places.get(file, []), expected)


def _by_records(checkpoint: TorchDistCheckpoint, *, workers: int, progress: Progress) -> Verification:
    records = list(records_of(checkpoint))
    damaged = _damages(records, workers, progress)
    without = sum(not record.has_checksum for record in records)
    if without == len(records):
        raise UserError(
            f"{checkpoint.folder} has no checksums, since torch wrote it with those turned off: only its structure"
            f" could be checked, and its {len(records)} chunks and objects are there"
        )
    return Verification(
        by_manifest=False,
        checked=len(records) - without,
        files=len({record.file for record in records}),
        nbytes=sum(record.nbytes for record in records if record.has_checksum),
        damaged=damaged,
        without_checksum=without,
    )
