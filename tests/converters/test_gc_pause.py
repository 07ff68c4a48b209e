"""Python's search for garbage is as it was after each of its pauses."""

import subprocess
import sys

PROGRAM = """
import gc
import weakref
from converters.gc_pause import gc_frozen


class Node:
    def __init__(self):
        self.itself = self


with gc_frozen():
    frozen = gc.get_freeze_count()
    assert frozen > 0
    garbage, alive = weakref.ref(Node()), Node()
    with gc_frozen(collect=True):
        assert garbage() is None
        old = weakref.ref(alive)
        del alive
        new = weakref.ref(Node())
        gc.collect()
        assert (old() is None, new() is None) == (False, True)
    assert gc.get_freeze_count() > frozen
assert gc.get_freeze_count() == 0
gc.collect()
assert old() is None
"""


def test_what_was_frozen_stays_so_until_the_outermost_pause_ends_and_can_then_be_freed() -> None:
    """In a process of its own, since that of the tests has frozen what it loaded."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
