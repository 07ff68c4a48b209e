"""Replaces an earlier export by a complete new one; if this is interrupted, the next run finishes it.

The new one is written next to the old one, its record last. Then the old one is renamed, the new one gets its name, and
the old one is removed.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from converters.durable import rename, sync
from converters.errors import UserError
from megarl.output.places import next_export, previous_export

_RECORD = "megarl_export.json"


def write_export(write: Callable[[Path], None], export: Path, step: int) -> None:
    """Let `write` create the export of `step`, which replaces `export` once it is complete."""
    finish_export(export)
    new = next_export(export)
    write(new)
    record = new / _RECORD
    record.write_text(json.dumps({"step": step}))
    sync(record)
    finish_export(export)


def finish_export(export: Path) -> None:
    """Move a completely written export, left by this run or by a killed one, to its place; remove one without record.

    An export may have its name and still lack something, such as the end tokens that the policy has learned.
    """
    new, old = next_export(export), previous_export(export)
    if _recorded_step(new) is None:
        _remove(new)
    if new.exists():
        if export.exists() or export.is_symlink():
            _remove(old)
            export.rename(old)
        rename(new, export)
    _remove(old)


def check_that_none_is_lost(exports: Iterable[Path]) -> None:
    """Raise UserError if there is an export, for a run that continues none and so must not replace one."""
    for export in exports:
        finish_export(export)
        if export.exists():
            raise UserError(
                f"{export} is there, but no checkpoint of a run that wrote it: move it away, or choose another"
                " output_dir"
            )


def step_of_export(export: Path) -> int | None:
    """The step of an export's weights; None if there is no export, or one that no run wrote."""
    finish_export(export)
    return _recorded_step(export)


def _recorded_step(export: Path) -> int | None:
    try:
        record = json.loads((export / _RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # the user has moved the export and left a link: keep their copy
    elif folder.exists():
        shutil.rmtree(folder)
