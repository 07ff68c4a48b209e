"""A file touched at every complete checkpoint, which tells a batch script that a run that died had made progress."""

import os
import sys
from pathlib import Path

PROGRESS_FILE = "MEGARL_PROGRESS_FILE"
"""Environment variable with its path, set by `slurm/cluster.sh`."""


def note_progress() -> None:
    """Touch the file if the environment names one; on failure the run prints a message and goes on."""
    path = os.environ.get(PROGRESS_FILE)
    if not path:
        return
    try:
        Path(path).touch()
    except OSError as error:
        print(f"warning: {PROGRESS_FILE}={path} cannot be touched: {error.strerror}", file=sys.stderr, flush=True)
