"""The file by which a batch script sees that a run that died had come further than the one before."""

import os
from pathlib import Path

PROGRESS_FILE = "MEGARL_PROGRESS_FILE"
"""Variable with its path, which `slurm/cluster.sh` sets."""


def note_progress() -> None:
    """Touch the file, if the environment names one."""
    if path := os.environ.get(PROGRESS_FILE):
        Path(path).touch()
