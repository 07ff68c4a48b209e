"""The process that supervises a sandboxed program. It uses only the standard library, and starts in milliseconds.

It sets up the isolation and starts the program. When the program has ended, or its time is over, it kills whatever is
left.

`namespaces`: the program has its own file system (the folders of the interpreter and of the system's programs and
libraries, such as /usr, read-only; an empty, writable /tmp in memory; nothing else of the machine), sees only its own
processes, has no network, and runs as a user that owns nothing. This is set up as root, or in a user namespace.

`limits`: for machines that do not allow namespaces. The program sees the machine's files and processes as the user that
it runs as, and can write where that user can. It gets no sockets except socket pairs, and cannot send signals.

In both, rlimits apply to each process, the number of processes is limited, and a seccomp filter refuses the system
calls that would bypass all this.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megarl.sandbox import namespaces, process_tree, system_calls
from megarl.sandbox.libc import call
from megarl.sandbox.users import another_user

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECUREBITS, _PR_CAP_AMBIENT = 1, 4, 28, 47
_NO_ROOT_FOR_GOOD, _CLEAR_ALL = 3, 4
_SIGNALLED = 128
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def main(parent: int, request_fd: int, complaint_fd: int) -> int:
    """Run the program of the request; return its exit code, or 128 plus its signal's number.

    When the time is over, this process ends itself by SIGALRM. If the machine does not allow the isolation, the error
    is written to `complaint_fd`.
    """
    os.set_inheritable(complaint_fd, False)
    with suppress(OSError):  # not every container has it
        # If the machine's memory runs out, the kernel ends the program, and not the largest process, a trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    with os.fdopen(request_fd, "rb") as file:
        request = json.load(file)
    try:
        return ISOLATIONS[request["isolation"]](request, parent)
    except Exception as error:  # noqa: BLE001 - the asking process raises it
        os.write(complaint_fd, f"{type(error).__name__}: {error}".encode())
        return 1


def _with_namespaces(request: Mapping[str, Any], parent: int) -> int:
    user = another_user()
    namespaces.enter(user)
    process_tree.die_with(parent, signal.SIGTERM)
    alive, here = os.pipe()
    first = process_tree.fork()
    if first:
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
        ended = process_tree.wait_end(first)
        if ended.told:
            # When a namespace's first process ends, the kernel kills all others, and reports its end only after theirs.
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            process_tree.end_by(ended.told)
        return ended.code
    os.close(here)
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)  # the parent died before PDEATHSIG was set
    os.umask(0o022)  # the program's user must be able to traverse the folders created here
    program_bytes = len(request["program"].encode(errors="surrogatepass"))
    namespaces.own_root(request["file_bytes"] + program_bytes)
    program = os.fork()
    if not program:
        processes = request["processes"] + (0 if user else namespaces.PROCESSES_BESIDE)
        _become_program(request, Path("/tmp"), user, processes, may_signal=True)
    while True:  # a namespace's first process must reap all that end in it
        pid, status = os.wait()
        if pid == program:
            os._exit(_exit_code(os.waitstatus_to_exitcode(status)))


def _with_limits(request: Mapping[str, Any], parent: int) -> int:
    process_tree.die_with(parent, signal.SIGTERM)
    process_tree.adopt_orphans()
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # so that a program of the same user cannot read its memory
    user = another_user()
    processes = request["processes"] + (0 if user else process_tree.tasks_of_user(os.getuid()))
    os.umask(0o077)
    # Two folders: another user's program owns the inner one, and could put a link in place of a folder in /tmp, which
    # the commands below would then follow as root.
    folder = Path(tempfile.mkdtemp(prefix="megarl-sandbox-"))
    folder.chmod(0o711)
    own_folder = folder / "program"
    own_folder.mkdir()
    supervisor = os.getpid()
    try:
        program = process_tree.fork()
        if not program:
            _become_program(request, own_folder, user, processes, may_signal=False)
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
        ended = process_tree.wait_end(program)
    finally:
        if os.getpid() == supervisor:  # the child comes here, too, if it fails to become the program
            process_tree.kill_descendants()
            subprocess.run(["chmod", "-R", "u+rwX", folder], check=False, capture_output=True)
            subprocess.run(["rm", "-rf", folder], check=True)
    if ended.told:
        process_tree.end_by(ended.told)
    return _exit_code(ended.code)


ISOLATIONS: Mapping[str, Callable[[Mapping[str, Any], int], int]] = {
    "namespaces": _with_namespaces,
    "limits": _with_limits,
}
"""Name of an isolation -> function that runs a request in it."""


def _can_have_capabilities() -> bool:
    """Whether processes started from here could gain capabilities: some are in the bounding set (capabilities(7))."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapBnd:")[2].split()[0], 16) != 0


def _become_program(
    request: Mapping[str, Any], folder: Path, user: int, processes: int, *, may_signal: bool
) -> NoReturn:
    os.setsid()
    os.chdir(folder)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    if user:
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    elif os.geteuid() == 0:
        # An ordinary user mapped to root in this container: the program must have only the user's rights.
        if _can_have_capabilities():
            call("prctl", _PR_SET_SECUREBITS, _NO_ROOT_FOR_GOOD, 0, 0, 0)
        call("prctl", _PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    Path("program.py").write_text(request["program"], encoding="utf-8", errors="surrogatepass")
    limits = {
        resource.RLIMIT_AS: request["memory_bytes"],
        resource.RLIMIT_CPU: request["cpu_s"],
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_FSIZE: request["file_bytes"],
        resource.RLIMIT_NOFILE: request["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for limit, value in limits.items():
        # At the soft limit, CPU time ends the program with SIGXCPU, which identifies it; at the hard limit with
        # SIGKILL.
        resource.setrlimit(limit, (value, value + (limit == resource.RLIMIT_CPU)))
    system_calls.forbid(may_signal=may_signal)
    os.execve(sys.executable, [sys.executable, "-I", "-B", "-X", "utf8", "program.py"], _ENVIRONMENT)


def _exit_code(code: int) -> int:
    return code if code >= 0 else _SIGNALLED - code
