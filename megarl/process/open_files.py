"""How many files a process may have open at once."""

import resource

_ENOUGH = 2**16
"""More help nobody, and some programs go through all numbers of files that they might have open."""


def allow_many_open_files() -> None:
    """Raise the limit of open files as far as it goes without the rights of an administrator.

    The soft limit is 1024 on most machines, for programs that use `select`; processes that are started inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
