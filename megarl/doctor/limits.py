"""Limits that the kernel sets for a process: lockable memory and open files."""

import resource
from dataclasses import dataclass
from pathlib import Path

_IPC_LOCK = 1 << 14
"""The capability to exceed the limit of locked memory, which can be given to a pod."""
_ALL_USERS = ["0", "0", "4294967295"]
_PROCESS = Path("/proc/self")
UNLIMITED_LOCKS = (
    "let it lock memory without limit: LimitMEMLOCK=infinity of slurmd, `ulimit -l unlimited` before `ray start`, or"
    " the capability IPC_LOCK for a pod"
)
"""The remedy for a limit of locked memory."""
SHARED_MEMORY = (
    "enlarge /dev/shm (--shm-size of a container, an emptyDir of a pod), or remove what ended programs left there"
)
"""The remedy for little shared memory."""
VERBS = "install rdma-core: libibverbs1 and ibverbs-providers on Debian and Ubuntu, in the container where there is one"
"""The remedy for InfiniBand without libibverbs."""


@dataclass(frozen=True)
class Limits:
    """Limits of a process; None means unlimited."""

    locked_memory_bytes: int | None = None
    """Also None for a process that is exempt from the limit."""
    open_files: int | None = None

    @property
    def locked_memory(self) -> str:
        """The limit in words."""
        if self.locked_memory_bytes is None:
            return "no limit"
        return f"{self.locked_memory_bytes / 1024**2:.3g} MiB"


def limits_here() -> Limits:
    """The limits of this process."""
    locked, files = (_soft(kind) for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    return Limits(None if _may_lock(_PROCESS) else locked, files)


def _soft(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def _may_lock(process: Path) -> bool:
    """Whether the process has the capability, which counts only outside a user namespace."""
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    is_of_host = (process / "uid_map").read_text().split() == _ALL_USERS
    return is_of_host and bool(int(status["CapEff"], 16) & _IPC_LOCK)
