"""Creates a tensor over memory that torch did not allocate, on a device that the caller names.

torch asks CUDA for the device of a pointer, and CUDA answers with the GPU that has the memory. But memory of another
GPU that is mapped into this process is to be accessed by the process's own GPU; DLPack lets the caller choose it.
"""

import ctypes

import torch
from torch import Tensor

_NAME = b"dltensor"
_UINT = 1
_KINDS = {"cpu": 1, "cuda": 2}
"""Device type -> its number in DLPack."""


class _Described(ctypes.Structure):
    """DLPack's DLManagedTensor with one dimension, followed by the length of that dimension."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset_bytes", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("delete", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def tensor_at(address: int, size_bytes: int, where: torch.device) -> Tensor:
    """uint8 [size_bytes] at an address that is valid on the device `where`; it does not keep the memory alive."""
    place = _libc.malloc(ctypes.sizeof(_Described))
    if not place:
        raise MemoryError
    # The C library frees the description with the last view. A Python function must not: if an exception ended the
    # view, it would be called with that exception set.
    described = _Described(
        address=address,
        kind=_KINDS[where.type],
        index=where.index or 0,
        dimensions=1,
        code=_UINT,
        bits=8,
        lanes=1,
        shape=place + _Described.length.offset,
        strides=None,
        offset_bytes=0,
        context=None,
        delete=ctypes.cast(_libc.free, ctypes.c_void_p),
        length=size_bytes,
    )
    ctypes.memmove(place, ctypes.addressof(described), ctypes.sizeof(described))
    return torch.from_dlpack(_new_capsule(place, _NAME, None))
