"""The size of the object store of a run's own Ray cluster."""

import shutil

from ray._private.utils import estimate_available_memory

from converters.errors import UserError

_FOLDER = "/dev/shm"
# The store's memory is allocated on use, so a large store costs a small run nothing, while a small one spills to disk.
_DEFAULT_BYTES = range(256 * 1024**2, 200 * 10**9)
_OF_MEMORY = 0.3
# Shared memory also holds segments of refits and of NCCL.
_OF_SHARED_MEMORY = 0.5
_FOR_THE_REST_BYTES = 100 * 10**6
"""Ray (2.60) may fail to start with less memory left besides the store."""


def store_bytes_here(asked: int | None) -> int:
    """The size of the store on this machine, from its present memory. Raises as `store_bytes`."""
    return store_bytes(asked, estimate_available_memory(), shutil.disk_usage(_FOLDER).free)


def store_bytes(asked: int | None, memory_bytes: int, shared_bytes: int) -> int:
    """Return `asked`, or else a share of the available memory and of the free shared memory.

    Raises UserError if there is no room for what was asked.
    """
    if asked is None:
        part = int(min(_OF_MEMORY * memory_bytes, _OF_SHARED_MEMORY * shared_bytes))
        return min(max(part, _DEFAULT_BYTES.start), _DEFAULT_BYTES.stop)
    if asked > min(shared_bytes, memory_bytes - _FOR_THE_REST_BYTES):
        raise UserError(
            f"cluster.object_store_bytes={asked} is more than there is room for: {_FOLDER} has {shared_bytes} bytes "
            f"free, and {memory_bytes} of memory are available, of which Ray wants {_FOR_THE_REST_BYTES} for the rest; "
            f"lower it, or enlarge {_FOLDER}"
        )
    return asked
