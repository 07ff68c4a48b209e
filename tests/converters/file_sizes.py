"""A limit of the size of files, which programs meet as they meet a full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_up_to(nbytes: int) -> Iterator[None]:
    """Within the context, a file of this process cannot grow beyond so many bytes: OSError, EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
