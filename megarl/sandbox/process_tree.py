"""Watches a child process, and ends it with all its descendants."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from megarl.sandbox.libc import call

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TOLD_TO_END = (signal.SIGALRM, signal.SIGTERM)
_WATCHED = (*_TOLD_TO_END, signal.SIGCHLD)


class Ended(NamedTuple):
    """How a watch on a child ended: exit code, negative for a signal; or `told`, an earlier signal to this process."""

    code: int = 0
    told: signal.Signals | None = None


def die_with(parent: int, by: signal.Signals) -> None:
    """Get the signal `by` when the parent dies; exit at once if it is dead already."""
    call("prctl", _PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork() -> int:
    """Fork a child to watch. From now on SIGALRM and SIGTERM wait here for `wait_end`, but not in the child."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    return child


def wait_end(child: int) -> Ended:
    """Wait for the end of a child from `fork`, or for a signal that ends this process."""
    while True:
        number = signal.Signals(signal.sigwait(_WATCHED))
        if number in _TOLD_TO_END:
            return Ended(told=number)
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return Ended(os.waitstatus_to_exitcode(status))


def end_by(number: int) -> NoReturn:
    """End this process by a signal."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os.kill(os.getpid(), number)
    raise AssertionError(f"{number} ended nothing")


def kill_descendants() -> None:
    """Kill and reap all descendants of this process, which must have adopted the orphans."""
    while True:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.wait()
        except ChildProcessError:
            return


def tasks_of_user(user: int) -> int:
    """The number of threads in all processes of a user, as the kernel counts them for RLIMIT_NPROC."""
    count = 0
    for _, status in _processes():
        if int(status["Uid"].split()[0]) == user:
            count += int(status["Threads"])
    return count


def _descendants() -> list[int]:
    if not Path("/proc/thread-self/children").exists():  # a kernel without CONFIG_PROC_CHILDREN
        return _descendants_among_all()
    found = [os.getpid()]
    for pid in found:
        found += _children(pid)
    return found[1:]


def _children(pid: int) -> list[int]:
    """Children of all threads of a process; empty if it has ended."""
    try:
        return [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _descendants_among_all() -> list[int]:
    parents = {pid: int(status["PPid"]) for pid, status in _processes()}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def _processes() -> Iterator[tuple[int, dict[str, str]]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                lines = Path("/proc", name, "status").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended
            yield int(name), dict(line.split(":", 1) for line in lines if ":" in line)
