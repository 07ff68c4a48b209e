"""Calls of C library functions that Python lacks."""

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library. Raises OSError, which names the function, if it returns -1."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = getattr(_LIBC, name)(*values)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} failed: {os.strerror(number)}")
    return result
