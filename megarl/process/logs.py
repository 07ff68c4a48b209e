"""Sentences that a process tells whoever looks after the run, and the end of what others have written."""

import os
import sys
import time
from pathlib import Path

_END_BYTES = 64 * 1024


def say(sentence: str) -> None:
    """Tell whoever looks after the run: a line on standard error, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


def last_lines(path: Path, count: int = 20) -> str:
    """The end of a log file, for an error message; however long the file has become."""
    try:
        if not path.exists():
            return "(no output)"
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except PermissionError as error:
        # Processes of other machines may be another user's, and it is not for that that a run ends.
        return f"({error.strerror})"
    return "\n".join(lines[-count:]) or "(no output)"
