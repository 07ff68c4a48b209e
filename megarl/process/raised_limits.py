"""Limits of a process, raised as far as they go without the rights of an administrator."""

import math
import resource

_ENOUGH_FILES = 2**16
"""More help nobody, and some programs go through all numbers of files that they might have open."""


def raise_limits() -> None:
    """Raise the limits of open files and of locked memory; processes that are started inherit them.

    The soft limit of files is 1024 on most machines, for programs that use `select`. In a job of Slurm the soft limit
    of locked memory is that of the shell from which it was submitted, and less than network cards need.
    """
    _raise(resource.RLIMIT_NOFILE, _ENOUGH_FILES)
    _raise(resource.RLIMIT_MEMLOCK, math.inf)


def _raise(kind: int, enough: float) -> None:
    limits = resource.getrlimit(kind)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(hard, enough)
    if soft < wanted:
        resource.setrlimit(kind, (limits[1] if wanted == hard else int(wanted), limits[1]))
