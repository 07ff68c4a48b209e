"""Ways out of a sandbox that were tried on it: each program prints REACHED where one leads anywhere."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from becoming import REMAPPED, USER
from sandbox_limits import LIMITS

from megarl.sandbox.run import run

ROOT = Path(__file__).parents[3]
SYSTEM_PYTHON = Path("/usr/bin/python3")
CALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
TRY = (
    "import fcntl, os, resource, signal, socket, struct, sys\n"
    "try:\n    {}\n    print('REACHED')\nexcept (OSError, ValueError): pass"
)


def attempt(line):
    return TRY.format(line)


def calls(*texts):
    """Calls of the C library that have to fail."""
    return CALL + "\n".join(f"if libc.{text} >= 0: print('REACHED', {text!r})" for text in texts)


X86 = os.uname().machine == "x86_64"
EVERYWHERE = {
    "another user": attempt("os.setuid(0)"),
    "another group": attempt("os.setgid(0)"),
    "the network": attempt("socket.create_connection(('127.0.0.1', 22), 1)"),
    "a device": attempt("os.mknod('d', 0o60666, os.makedev(254, 0))"),
    "the kernel's settings": attempt("open('/proc/sys/kernel/core_pattern', 'w')"),
    "priority": attempt("os.nice(-5)"),
    "the system's folders": attempt("open('/usr/lib/x', 'w')"),
    "more memory": attempt("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "another process's limits": attempt("resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))"),
    "the supervisor's memory": attempt("open(f'/proc/{os.getppid()}/mem')"),
    "mounts": calls(
        "mount(b'x', b'/tmp', b'tmpfs', 0, 0)",
        "umount2(b'/tmp', 2)",
        "chroot(b'/tmp')",
        "unshare(0x10000000)",
        "setns(0, 0)",
        "syscall(428, -100, b'/', 1)",
        "syscall(429, 3, b'', -100, b'/tmp', 4)",
        "syscall(442, -100, b'/', 0x8000, 0, 32)",
        "syscall(438, 3, 0, 0)",
        "syscall(425, 1, 0)",
        "syscall(321, 0, 0, 0)" if X86 else "syscall(280, 0, 0, 0)",
        "ptrace(16, os.getppid(), 0, 0)",
    ),
    "open files of others": (
        "import os\nfor fd in range(3, 64):\n    try: print('REACHED', fd, os.fstat(fd))\n    except OSError: pass"
    ),
    "the environment": (
        "import os\n"
        "known = {'PATH', 'HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}\n"
        "if set(os.environ) - known: print('REACHED', set(os.environ) - known)"
    ),
    "its own input": "import os\ntry: os.write(0, b'x')\nexcept OSError: pass",
    "a tree that cannot be entered": "import os\nos.makedirs('a/b')\nos.chmod('a', 0)",
    "shared memory without end": (
        "import mmap\nkept, size = [], 0\n"
        "try:\n"
        "    while size < 4000:\n"
        "        kept.append(mmap.mmap(-1, 2**26)); size += 64\n"
        "    print('REACHED')\n"
        "except (OSError, MemoryError, ValueError): pass"
    ),
}
IN_NAMESPACES = {
    "a link outside": attempt("os.symlink('/etc/passwd', 'l'); open('l')"),
    "the host's name": attempt("assert os.uname().nodename and open('/proc/sys/kernel/hostname')"),
    "homes": "import os\n"
    "for path in ('/home', '/var', '/run', '/dev/shm', '/sys', '/proc'):\n"
    "    if os.path.isdir(path) and os.listdir(path): print('REACHED', path)",
    "other processes": "import os\nfor pid in (1, os.getppid()):\n    try: os.kill(pid, 9); print('REACHED')\n"
    "    except OSError: pass",
}
IN_LIMITS = {
    "other processes": attempt("os.kill(os.getppid(), 0)"),
    "a real-time signal": calls("sigqueue(os.getppid(), 34, 0)"),
    **{
        f"a file's signal {number}": attempt(f"fcntl.fcntl(os.pipe()[0], {number}, {argument})")
        for number, argument in {4: "os.O_ASYNC", 8: "os.getppid()", 10: "9", 15: "struct.pack('ii', 1, 1)"}.items()
    },
    **{
        f"a socket's signal {number:#x}": attempt(
            f"fcntl.ioctl(socket.socketpair()[0], {number}, struct.pack('i', os.getppid()))"
        )
        for number in (0x8901, 0x8902, 0x5452)
    },
    "a thread's signal": calls("syscall(234, os.getppid(), os.getppid(), 0)" if X86 else "kill(os.getppid(), 0)"),
}
BY_SYSTEM = f"""
import sys
from megarl.sandbox.run import *
for program in sys.argv[2:]:
    finished = run(program, b"in", {LIMITS}, sys.argv[1])
    print(finished.end, finished.output.decode(), end="")
"""


@pytest.mark.parametrize("way", EVERYWHERE | IN_NAMESPACES)
def test_namespaces_have_no_way_out(way):
    finished = run((EVERYWHERE | IN_NAMESPACES)[way], b"in", LIMITS, "namespaces")
    assert (finished.end, b"REACHED" in finished.output) == ("exited", False), finished


@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason="needs /usr/bin/python3, which any user can run")
@pytest.mark.parametrize("way", EVERYWHERE | IN_LIMITS)
def test_limits_have_no_way_to_more(way):
    words = [str(SYSTEM_PYTHON), "-B", "-c", BY_SYSTEM, "limits", (EVERYWHERE | IN_LIMITS)[way]]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        environment = {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        ran = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True)
        assert os.listdir(folder) == []
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "exited "


LINKS_ITS_FOLDER = "import os\nplace = os.getcwd()\nos.rename(place, {moved!r})\nos.symlink({closed!r}, place)"


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON.exists(), reason="needs root, whose programs are another's")
def test_a_program_cannot_have_root_clean_up_another_folder():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        closed = Path(folder, "closed")
        closed.mkdir(mode=0o500)
        program = LINKS_ITS_FOLDER.format(moved=f"{folder}/moved", closed=str(closed))
        words = [str(SYSTEM_PYTHON), "-B", "-c", BY_SYSTEM, "limits", program]
        environment = {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        ran = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (0, "exited "), ran.stderr
        assert os.listdir(folder) == ["closed"]
        assert closed.stat().st_mode & 0o777 == 0o500


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose programs are another's")
def test_an_interpreter_that_another_user_cannot_run_is_named():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # closed to others
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        words = [f"{folder}/venv/bin/python", "-B", "-c", BY_SYSTEM, "limits", "print(1)"]
        environment = {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        ran = subprocess.run(words, env=environment, cwd="/", capture_output=True, text=True)
        assert os.listdir(folder) == ["venv"]
    assert f"PermissionError: [Errno 13] Permission denied: '{words[0]}'" in ran.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON.exists(), reason="needs root, to become others")
@pytest.mark.parametrize(
    ("who", "isolation", "leads_nowhere"),
    [
        (USER, "limits", ()),
        (REMAPPED, "limits", ("another user", "another group")),  # they become root, which they are called
        (REMAPPED, "namespaces", ("other processes",)),  # the first of a namespace, which no signal ends
    ],
    ids=["user", "remapped", "remapped in namespaces"],
)
def test_programs_of_a_user_itself_have_no_way_to_more(who, isolation, leads_nowhere):
    ways = EVERYWHERE | (IN_NAMESPACES if isolation == "namespaces" else IN_LIMITS)
    programs = [program for way, program in ways.items() if way not in leads_nowhere]
    words = [*who, str(SYSTEM_PYTHON), "-B", "-c", BY_SYSTEM, isolation, *programs]
    ran = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, cwd="/", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "exited " * len(programs)
