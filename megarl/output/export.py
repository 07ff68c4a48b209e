"""An export takes the place of an earlier one when it is complete: there is one at any moment, or the next run ends it.

The new one is written beside the old one. Then the old one is moved away, the new one gets its name, the old one goes.
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
    """Let `write` make a folder, which appears when it is complete; it becomes `export`, that of `step`."""
    finish_export(export)
    new = next_export(export)
    write(new)
    record = new / _RECORD
    record.write_text(json.dumps({"step": step}))
    sync(record)
    finish_export(export)


def finish_export(export: Path) -> None:
    """Let a complete export that was written take its place, whether by this run or by one that was killed."""
    new, old = next_export(export), previous_export(export)
    if new.exists():
        if export.exists() or export.is_symlink():
            _remove(old)
            export.rename(old)
        rename(new, export)
    _remove(old)


def check_that_none_is_lost(exports: Iterable[Path]) -> None:
    """A run that continues none has no export to replace. Raises UserError if there is one."""
    for export in exports:
        finish_export(export)
        if export.exists():
            raise UserError(
                f"{export} is there, but no checkpoint of a run that wrote it: move it away, or choose another"
                " output_dir"
            )


def step_of_export(export: Path) -> int | None:
    """The step whose weights an export holds; None where there is none, or none that a run wrote."""
    finish_export(export)
    try:
        record = json.loads((export / _RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # somebody has moved the export and left a link: theirs stays
    elif folder.exists():
        shutil.rmtree(folder)
