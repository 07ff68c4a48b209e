"""Messages to whoever watches the run, and the last lines of other processes' logs."""

import os
import sys
import time
from pathlib import Path

_END_BYTES = 64 * 1024


def say(sentence: str) -> None:
    """Print a line for whoever watches the run to standard error, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


def last_lines(path: Path, count: int = 20) -> str:
    """Return the end of a log file for an error message, without reading the rest of a large file."""
    try:
        if not path.exists():
            return "(no output)"
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except PermissionError as error:
        # The log may be another user's, written on another machine: not a reason for the run to end.
        return f"({error.strerror})"
    return "\n".join(lines[-count:]) or "(no output)"
