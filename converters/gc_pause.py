"""Python's search for garbage, put off where there is none to find."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Do not look for garbage among hundreds of thousands of new records that all live: it can take most of the time.

    As a decorator of a function, for as long as the function runs.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def gc_frozen(*, collect: bool = False) -> Iterator[None]:
    """Leave out of the search for garbage, inside, what is there at its beginning; with `collect` free garbage before.

    To look at half a million objects of imported modules takes a tenth of a second, in which no thread goes on: a
    quarter of the controller's time where thousands of responses come in. Inside another such context all stays frozen
    until that one ends.
    """
    was_frozen = gc.get_freeze_count() > 0
    if collect:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            # It may be garbage by then, and libraries (nanobind 2) complain where Python ends before it is freed.
            gc.unfreeze()
