"""Raises the limits of a process as far as possible without root."""

import math
import resource

_ENOUGH_FILES = 2**16
"""More is never needed, and some programs loop over all possible file descriptors."""


def raise_limits() -> None:
    """Raise the limits of open files and of locked memory, also for child processes.

    The soft limit of open files is 1024 on most machines, for programs that use `select`. A Slurm job inherits the soft
    limit of locked memory from the submitting shell, which is below what network cards need.
    """
    _raise(resource.RLIMIT_NOFILE, _ENOUGH_FILES)
    _raise(resource.RLIMIT_MEMLOCK, math.inf)


def _raise(kind: int, enough: float) -> None:
    limits = resource.getrlimit(kind)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(hard, enough)
    if soft < wanted:
        resource.setrlimit(kind, (limits[1] if wanted == hard else int(wanted), limits[1]))
