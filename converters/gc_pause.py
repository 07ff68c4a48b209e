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
def gc_frozen() -> Iterator[None]:
    """Leave out of the search for garbage, inside, what is there at its beginning: all of it stays.

    Where the caller has done so, that is left as it is.
    """
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            # Else nothing of it is freed when Python ends, and libraries (nanobind 2) complain of that.
            gc.unfreeze()
