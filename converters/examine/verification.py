"""Verifies, by checksums, that a checkpoint still has the bytes that were written."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from converters.errors import UserError
from converters.examine.counting import Count
from converters.examine.opening import open_checkpoint
from converters.examine.records import records_of
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.manifest import MANIFEST, Manifest, checks_of, damages, manifest_of, missing_files
from converters.stream.run import Progress


@dataclass(frozen=True)
class Verification:
    """The result of verifying a checkpoint."""

    by_manifest: bool
    """Whether it was verified by a manifest; else by torch's checksums of chunks, which do not cover names and shapes.
    """
    checked: int
    """Number of tensors, chunks and objects."""
    files: int
    nbytes: int
    """Number of bytes read for the comparison."""
    damaged: Sequence[str]
    """Tensors, chunks and objects whose bytes differ from those written, and where."""
    missing: Sequence[str] = ()
    """Files of the manifest that do not exist."""
    unlisted: Sequence[str] = ()
    """Files that are not in the manifest, and so were not verified."""
    without_checksum: int = 0
    """Number of chunks and objects of which only the structure could be verified."""

    @property
    def is_intact(self) -> bool:
        """Whether every byte with a checksum is unchanged."""
        return not (self.damaged or self.missing)


def verify(folder: Path, *, workers: int, progress: Progress) -> Verification:
    """Verify a checkpoint against its manifest or, for torch_dist without one, against its chunks' checksums.

    Raises UserError if there are no checksums or no checkpoint, and for structural damage without a manifest.
    """
    if found := manifest_of(folder):
        return _by_manifest(*found, workers=workers, progress=progress)
    checkpoint = open_checkpoint(folder)
    if isinstance(checkpoint, HuggingFaceCheckpoint):
        raise UserError(
            f"{folder} has no checksums: it is a HuggingFace folder without {MANIFEST}, which megarl writes into its"
            f" own; the {len(checkpoint.shapes)} tensors have the bytes that their headers promise, and for more"
            " compare it with another copy, by megarl diff"
        )
    return _by_records(checkpoint, workers=workers, progress=progress)


def _by_manifest(root: Path, manifest: Manifest, *, workers: int, progress: Progress) -> Verification:
    names = manifest.data_files | manifest.files.keys()
    missing = missing_files(root, manifest)
    there = names.difference(missing)
    folders = {(root / name).parent for name in there}
    present = {str(path.relative_to(root)) for each in folders for path in each.iterdir() if path.is_file()}
    checks = checks_of(root, manifest)
    count = Count(sum(check.nbytes for check in checks), progress)
    return Verification(
        by_manifest=True,
        checked=len(manifest.tensors),
        files=len(there),
        nbytes=sum(check.nbytes for check in checks),
        damaged=damages(checks, workers=workers, on_bytes=count.add),
        missing=missing,
        unlisted=sorted(present - names - {MANIFEST}),
    )


def _by_records(checkpoint: TorchDistCheckpoint, *, workers: int, progress: Progress) -> Verification:
    records = list(records_of(checkpoint))
    count = Count(sum(record.nbytes for record in records), progress)
    damaged = damages(records, workers=workers, on_bytes=count.add)
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
