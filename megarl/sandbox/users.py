"""Unused user ids that sandboxed programs run as if this process is root."""

import os
import pwd
from pathlib import Path

_FIRST = (1_879_048_192, 10_000)
"""First ids that no system assigns (https://systemd.io/UIDS-GIDS), and others for containers that map few ids."""
_COUNT = 50_000


def another_user() -> int:
    """Return a user id that owns nothing, and runs few programs at a time, as the kernel counts processes per user.

    Returns 0 if this process is not root, or root only within a container whose single user is an ordinary one outside.
    Raises OSError if no id is free: the kernel does not limit the processes of the machine's root.
    """
    if os.geteuid() != 0 or _is_one_remapped():
        return 0
    mapped = _mapped("uid_map"), _mapped("gid_map")
    for first in _FIRST:
        for offset in range(_COUNT):
            user = first + (os.getpid() + offset) % _COUNT
            if not all(any(user in numbers for numbers in each) for each in mapped):
                break
            if not _is_somebody(user):
                return user
    raise OSError(
        "as root, programs need a user of their own, and this container has no number that nobody has: start it with "
        "more users, or as one that is not root"
    )


def _is_one_remapped() -> bool:
    """Whether this process's user namespace has a single user, who is not root outside."""
    _, outside, *counts_and_more = Path("/proc/self/uid_map").read_text().split()
    return outside != "0" and counts_and_more == ["1"]


def _mapped(name: str) -> list[range]:
    """The ids mapped in this process's user namespace."""
    lines = Path("/proc/self", name).read_text().splitlines()
    starts_and_counts = [(int(start), int(count)) for start, _, count in map(str.split, lines)]
    return [range(start, start + count) for start, count in starts_and_counts]


def _is_somebody(user: int) -> bool:
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True
