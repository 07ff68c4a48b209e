"""Finds the manifest of a checkpoint."""

from pathlib import Path, PurePosixPath

from converters.formats.torch_dist import LATEST
from converters.manifest.content import Manifest, read_manifest

_DIGITS, _MOST_DIGITS = 7, 20


def manifest_of(folder: Path) -> tuple[Path, Manifest] | None:
    """Find the manifest for the checkpoint in `folder`, and return it with its folder.

    It is in the iteration below `folder` that the tracker names, in `folder` itself, or in its parent. Returns None if
    there is none; raises UserError if it is damaged.
    """
    newest = _newest(folder)
    for root in (*([folder / newest] if newest else []), folder, folder.absolute().parent):
        manifest = read_manifest(root)
        if manifest and _is_about(manifest, folder / newest, root):
            return root, manifest
    return None


def _newest(folder: Path) -> str:
    """The iteration below `folder` that its tracker names; "" without a tracker."""
    tracker = folder / LATEST
    latest = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    name = f"iter_{latest.zfill(_DIGITS)}" if latest.isdecimal() and len(latest) < _MOST_DIGITS else ""
    return name if name and (folder / name).is_dir() else ""


def _is_about(manifest: Manifest, checkpoint: Path, root: Path) -> bool:
    """Whether the manifest contains the files of the checkpoint.

    After a run has continued from a converted checkpoint, the manifest in the parent folder is not that of the newest
    checkpoint.
    """
    parts = checkpoint.absolute().relative_to(root.absolute()).parts
    return not parts or any(PurePosixPath(file).parts[: len(parts)] == parts for file in manifest.data_files)
