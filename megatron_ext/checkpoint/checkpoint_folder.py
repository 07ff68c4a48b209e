"""Checkpoint folders: written under a temporary name, and complete once renamed.

A checkpoint is a folder `iter_0000010` as Megatron-LM lays it out, with two files more: `megarl.json` for what the
controller knows, and a manifest with a checksum of everything. kill -9 at any moment leaves the last complete
checkpoint the latest.
"""

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.durable import AWAY, complete, rename, sync_all
from converters.errors import UserError
from converters.formats.torch_dist import LATEST
from converters.manifest import MANIFEST, read_manifest, require_files, write_manifest
from converters.stream.targets import Written

CONTROLLER_STATE = "megarl.json"
_PARTIAL = ".partial"
_WRITTEN = "written.json"


class DiskUnavailableError(Exception):
    """A checkpoint cannot be written now, but the user need not change anything: the disk may recover."""


def iteration_folder(root: Path, iteration: int) -> Path:
    """The folder of one checkpoint below `root`."""
    return root / f"iter_{iteration:07d}"


def partial_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint is written until it is complete."""
    return root / f"iter_{iteration:07d}{_PARTIAL}"


def complete_iterations(root: Path) -> list[int]:
    """Iterations with a complete checkpoint below `root`, in order."""
    matches = (re.fullmatch(r"iter_(\d{7})", path.name) for path in root.glob("iter_*"))
    return sorted(int(match.group(1)) for match in matches if match)


def begin(root: Path, iteration: int) -> Path:
    """Create the folder for a checkpoint; removes the remains of an interrupted one."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"iter_*{_PARTIAL}"):
            _remove(leftover)
        folder = partial_folder(root, iteration)
        folder.mkdir()
    except OSError as error:
        raise disk_error(error, root) from error
    return folder


def list_written(folder: Path, written: Mapping[str, Sequence[Written]]) -> None:
    """Record the contents of the files in `folder`, so that `commit` need not read them for the manifest."""
    listed = {name: [each.as_list() for each in places] for name, places in written.items()}
    (folder / _WRITTEN).write_text(json.dumps(listed))


def commit(
    root: Path,
    iteration: int,
    controller_state: Mapping[str, Any],
    keep: int,
    keep_every: int = 0,
    known: Sequence[Written] = (),
) -> Path:
    """Give a written checkpoint its name, make it the latest, and delete earlier ones.

    Kept are the newest `keep` checkpoints, this one included, and those whose iteration is a multiple of `keep_every`.
    Complete files in `known` are not read for the manifest.
    """
    partial, folder = partial_folder(root, iteration), iteration_folder(root, iteration)
    replaced = root / f"{folder.name}.replaced{_PARTIAL}"
    try:
        (partial / CONTROLLER_STATE).write_text(json.dumps(controller_state, indent=1))
        write_manifest(partial, _listed(partial), {"iteration": iteration}, known)
        sync_all(partial)
        if folder.exists():
            folder.rename(replaced)  # removing it first would leave no checkpoint meanwhile
        rename(partial, folder)
        tracker = root / (LATEST + _PARTIAL)
        tracker.write_text(str(iteration))
        complete(tracker, root / LATEST)
    except OSError as error:
        abandon(root, iteration)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        raise disk_error(error, root) from error
    if replaced.exists():
        _remove(replaced)
    for old in complete_iterations(root)[:-keep]:
        if not keep_every or old % keep_every:
            _delete(root, old)
    return folder


def _delete(root: Path, iteration: int) -> None:
    """Delete a checkpoint, renaming it first so that it no longer counts as complete."""
    going = root / f"{iteration_folder(root, iteration).name}.deleted{_PARTIAL}"
    iteration_folder(root, iteration).rename(going)
    _remove(going)


def _remove(folder: Path) -> None:
    """Remove a folder; files that cannot be removed now, such as open ones on NFS, are left to `begin`."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        where = error.filename or folder
        why = f"{where}: {error.strerror}"
        said = f"{folder} cannot be removed ({why}): end what reads there; the next checkpoint tries again"
        print(said, file=sys.stderr, flush=True)


def _listed(folder: Path) -> dict[str, list[Written]]:
    """Read the lists in `folder` and below, by paths relative to it, and delete the lists."""
    listed: dict[str, list[Written]] = {}
    for path in sorted(folder.rglob(_WRITTEN)):
        below = path.parent.relative_to(folder)
        for name, places in json.loads(path.read_text()).items():
            written = [replace(each, file=str(below / each.file)) for each in map(Written.from_list, places)]
            listed[str(below / name) if below.parts else name] = written
        path.unlink()
    return listed


def abandon(root: Path, iteration: int) -> None:
    """Remove a checkpoint that could not be completed."""
    shutil.rmtree(partial_folder(root, iteration), ignore_errors=True)


def read_controller_state(folder: Path) -> dict[str, Any]:
    """Read the controller's state of the checkpoint `folder`; verifies every small file against the manifest.

    Raises UserError if a file is missing, has another size, or (other than tensors) has changed bytes. Tensors are
    verified by the ranks that read them.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"{folder} has no {MANIFEST}, so that nobody knows whether it is whole: copy it again, or move it away and"
            " go on from the checkpoint before it"
        )
    require_files(folder, manifest)
    if CONTROLLER_STATE not in manifest.files:
        raise UserError(f"{folder / MANIFEST} has no {CONTROLLER_STATE}: no run can go on from this checkpoint")
    return json.loads((folder / CONTROLLER_STATE).read_text())


def disk_error(error: OSError, root: Path) -> UserError | DiskUnavailableError:
    """The error for a `root` that cannot be written: UserError, unless only the disk is to blame."""
    failed = f"cannot write a checkpoint below {root}: {error.strerror}"
    if error.errno in AWAY:
        return DiskUnavailableError(failed)
    return UserError(f"{failed}; free space or choose another output_dir (the last complete checkpoint is untouched)")
