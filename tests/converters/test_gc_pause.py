"""Python's search for garbage is as it was after each of its pauses."""

import subprocess
import sys

PROGRAM = """
import gc
from converters.gc_pause import gc_frozen

with gc_frozen():
    assert gc.get_freeze_count() > 0
    with gc_frozen():
        pass
    assert gc.get_freeze_count() > 0
assert gc.get_freeze_count() == 0
"""


def test_what_was_frozen_can_be_freed_again() -> None:
    """In a process of its own, since that of the tests has frozen what it loaded."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
