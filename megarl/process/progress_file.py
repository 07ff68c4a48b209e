"""A file that is touched with every complete checkpoint: by it a batch script sees that a run that died got further."""

import os
import sys
from pathlib import Path

PROGRESS_FILE = "MEGARL_PROGRESS_FILE"
"""Variable with its path, which `slurm/cluster.sh` sets."""


def note_progress() -> None:
    """Touch the file, if the environment names one; where that fails, the run goes on and says so."""
    path = os.environ.get(PROGRESS_FILE)
    if not path:
        return
    try:
        Path(path).touch()
    except OSError as error:
        print(f"warning: {PROGRESS_FILE}={path} cannot be touched: {error.strerror}", file=sys.stderr, flush=True)
