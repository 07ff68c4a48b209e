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
