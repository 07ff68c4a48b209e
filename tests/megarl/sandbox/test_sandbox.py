import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import psutil
import pytest
from becoming import REMAPPED, USER
from eventually import eventually
from sandbox_limits import LIMITS

from megarl.sandbox.run import SandboxUnavailableError, run

ROOT = Path(__file__).parents[3]


def finish(program, stdin=b"", **limits):
    return run(program, stdin, replace(LIMITS, **limits), "namespaces")


def processes_with(mark):
    """Processes whose command line or environment holds a text; a program cannot hide its own command line."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if mark.encode() in Path("/proc", name, "cmdline").read_bytes():
                    found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


@pytest.fixture
def no_new_children():
    """The test ends with the child processes that it began with: what other tests share lives on."""
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("way", ["sys.stdin", "open(0)", "os.fdopen(0)", "io.BytesIO(os.read(0, 99))"])
def test_input_is_read(way):
    assert finish(f"import io, os, sys\nprint(int({way}.readline()))", b"6\n").output == b"6\n"


def test_a_process_with_many_open_files_reads_a_program_s_output():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert finish("print(input())", b"6\n").output == b"6\n"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_program_reads_its_input_and_ends_with_its_code():
    finished = finish("import sys\nprint(int(input()) + 1)\nsys.exit(3)", b"6\n")
    assert (finished.end, finished.code, finished.output) == ("exited", 3, b"7\n")


def test_a_signal_is_told_from_an_exit():
    assert finish("import os\nos.kill(os.getpid(), 11)").code == 128 + 11


def test_the_interpreters_packages_can_be_imported():
    assert finish("import numpy\nprint(int(numpy.ones(3).sum()))", memory_bytes=2**30, wall_s=60).output == b"3\n"


CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
ATTEMPTS = {
    "a socket": "import socket\nsocket.socket()",
    "a raw system call of another architecture": (
        "import ctypes\nr = ctypes.CDLL(None, use_errno=True).syscall(0x40000000 | 41, 2, 1, 0)\nassert r != -1"
    ),
    "io_uring": "import ctypes\nassert ctypes.CDLL(None).syscall(425, 1, bytes(120)) != -1",
    "a namespace of its own": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) != -1",
    "a namespace by clone": f"import ctypes\nassert ctypes.CDLL(None).syscall({CLONE}, 0x10000011, 0, 0, 0, 0) != -1",
    "memory that no limit counts": "import os\nos.memfd_create('a')",
    "shared memory": "import ctypes\nassert ctypes.CDLL(None).shmget(0, 4096, 0o1600) != -1",
    "the machine's users": "open('/etc/passwd')",
    "the machine's processes": "import os\nos.listdir('/proc')",
    "its input by name": "open('/dev/stdin')",
    "the repository": f"open({str(ROOT / 'README.md')!r})",
    "a file outside": "open('/usr/megarl-was-here', 'w')",
    "a file in the interpreter's folder": "import sys, os\nopen(os.path.join(sys.base_prefix, 'a'), 'w')",
    "the root": "open('/megarl-was-here', 'w')",
    "root again": "import os\nos.setuid(0)",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
    "a device": "import os\nos.mknod('/tmp/sda', 0o60600, os.makedev(8, 0))",
    "a large file": "open('/tmp/a', 'wb').write(bytes(20 * 2**20))",
    "many files": "for n in range(9999): open(f'/tmp/{n}', 'w')",
    "many open files": "kept = [open('/dev/null') for _ in range(200)]",
    "much memory": "x = bytearray(10**9)",
    "deep recursion": "x = ()\nfor _ in range(10**6): x = (x,)\nhash(x)",
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_program_does_not_get(attempt):
    reached = finish(f"print('begun', flush=True)\n{ATTEMPTS[attempt]}\nprint('reached')")
    assert reached.output == b"begun\n"
    assert (reached.end, reached.code) != ("exited", 0)


def test_files_together_are_limited():
    # The fourth finds no room.
    program = "for n in range(5):\n    open(f'/tmp/{n}', 'wb', 0).write(bytes(2**20 - 1000))\n    print(n, flush=True)"
    assert finish(program, file_bytes=3 * 2**20).output == b"0\n1\n2\n"


def test_the_number_of_processes_is_limited():
    # Counts, and stops by itself: nothing to be afraid of if the limit does not hold.
    program = (
        "import os, time\nbegun = 0\n"
        "try:\n"
        "    while begun < 30:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(99)\n"
        "            os._exit(0)\n"
        "        begun += 1\n"
        "except BlockingIOError:\n"
        "    pass\n"
        "print(begun)\n"
    )
    assert finish(program, processes=5).output == b"4\n"


def test_threads_count_as_processes():
    program = (
        "import threading, time\nbegun = 0\n"
        "try:\n"
        "    while begun < 30:\n"
        "        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
        "        begun += 1\n"
        "except RuntimeError:\n"
        "    print(begun)\n"
    )
    assert finish(program, processes=5).output == b"4\n"


HOSTILE = {
    "sleeps": "import time\ntime.sleep(99)",
    "spins": "while True: pass",
    "ignores signals": "import signal\n"
    "for n in set(signal.valid_signals()) - {9, 19}: signal.signal(n, lambda *_: None)\nwhile True: pass",
    "stops itself": "import os\nos.kill(os.getpid(), 19)",
    "forks for ever": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "reads for ever": "import sys\nwhile True: sys.stdin.read()",
    "kills everything": (
        "import os\nfor pid in (-1, 1):\n    try: os.kill(pid, 9)\n    except OSError: pass\nwhile True: pass"
    ),
    "hangs in C": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
}


@pytest.mark.usefixtures("no_new_children")
@pytest.mark.parametrize("act", HOSTILE)
def test_what_does_not_end_is_ended(act):
    finished = finish(HOSTILE[act], wall_s=0.7, cpu_s=30)
    assert (finished.end, finished.code) == ("timed_out", -signal.SIGALRM)  # by the supervisor's clock


def test_what_is_left_behind_is_ended():
    mark = f"left-behind-by-{os.getpid()}"
    program = (
        "import os, sys, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        f"            os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(99)', '{mark}'])\n"
        "        os._exit(0)\n"
        "time.sleep(0.5)\nprint('done')\n"
    )
    assert finish(program, processes=16).output == b"done\n"
    assert processes_with(mark) == []


@pytest.mark.usefixtures("no_new_children")
def test_endless_output_is_cut():
    finished = finish("while True: print('a' * 10**6)", output_bytes=2**20)
    assert (finished.end, finished.output) == (
        "too_much_output",
        (b"a" * 10**6 + b"\n")[: 2**20] + b"a" * (2**20 - 10**6 - 1),
    )


def test_a_supervisor_dies_with_the_one_that_asked():
    mark = f"orphan-of-{os.getpid()}"
    program = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'while True: pass', '{mark}'])"
    limits = replace(LIMITS, wall_s=60)
    ask = f"import sys\nfrom megarl.sandbox.run import *\nrun(sys.stdin.read(), b'', {limits}, 'namespaces')"
    asking = subprocess.Popen([sys.executable, "-c", ask], env={"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE)
    asking.stdin.write(program.encode())
    asking.stdin.close()
    assert eventually(lambda: processes_with(mark))
    asking.kill()
    asking.wait()
    assert eventually(lambda: not processes_with(mark))


def test_what_a_machine_does_not_allow_is_said(monkeypatch):
    monkeypatch.setattr("megarl.sandbox.run._SUPERVISOR", BROKEN_SUPERVISOR)
    with pytest.raises(SandboxUnavailableError, match="unshare failed: Operation not permitted"):
        finish("print(1)")


BROKEN_SUPERVISOR = """
import os, sys
sys.path.append(sys.argv[1])
from megarl.sandbox import supervisor, system_calls
system_calls.forbid(may_signal=True)
sys.exit(supervisor.main(*map(int, sys.argv[2:])))
"""
"""One that the kernel forbids to unshare."""


AS_ROOT = """
import os
from megarl.sandbox import namespaces
namespaces.enter(1)
if os.fork() == 0:
    namespaces.own_root(2**20)
    for path in ("/usr/megarl-was-here", "/megarl-was-here", os.path.join(os.path.dirname(os.__file__), "was-here")):
        try:
            open(path, "w")
            os.unlink(path)
        except OSError as error:
            print(error.strerror, flush=True)
else:
    os.wait()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_is_taken_over_cannot_be_written_even_by_root():
    ran = subprocess.run([sys.executable, "-c", AS_ROOT], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ran.stdout == "Read-only file system\n" * 3


# In what follows, a plain user has to be able to run the interpreter; the system's own is as good as any.
SYSTEM_PYTHON = Path("/usr/bin/python3")
# As with --security-opt=no-new-privileges and no capability: there is none to be kept from programs.
POWERLESS = [*REMAPPED, "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"]
USERS = {"root": [], "user": USER, "remapped": REMAPPED, "powerless": POWERLESS}
BY_USER = f"""
import sys
import tempfile
from dataclasses import replace
from megarl.sandbox.run import *
print(run(sys.argv[2], b'', replace({LIMITS}, wall_s=float(sys.argv[3]), processes=5), sys.argv[1]))
"""
ELSEWHERE = {
    "ends": ("print(7)", "end='exited', code=0, output=b'7\\n'"),
    "a socket": ("import socket\nsocket.socket()", "code=1, output=b''"),
    "the supervisor": ("import os\nos.kill(os.getppid(), 9)\nprint(1)\nwhile True: pass", ""),
    "leaves behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(99)\nprint(7)",
        "output=b'7\\n'",
    ),
    "an event loop": ("import asyncio\nasyncio.run(asyncio.sleep(0))\nprint(7)", "output=b'7\\n'"),
    "never ends": ("import os\nos.fork()\nwhile True: pass", "end='timed_out'"),
    "counts": (
        "import os, time\nn = 0\ntry:\n    while n < 30:\n"
        "        if os.fork() == 0: time.sleep(0.3); os._exit(0)\n        n += 1\n"
        "except BlockingIOError: print(n)",
        "output=b'",
    ),
}


@pytest.fixture
def scratch():
    """A folder that other users reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON.exists(), reason="needs root, to become others")
@pytest.mark.parametrize("act", ELSEWHERE)
@pytest.mark.parametrize(
    ("user", "isolation"),
    [("root", "limits"), ("powerless", "limits"), *product(("user", "remapped"), ("namespaces", "limits"))],
)
def test_other_users_and_limits_alone(user, isolation, act, scratch):
    program, said = ELSEWHERE[act]
    # Another test's sandboxes come and go in /tmp.
    scratch.chmod(0o777)
    ran = subprocess.run(
        [
            *USERS[user],
            str(SYSTEM_PYTHON),
            "-B",
            "-c",
            BY_USER,
            isolation,
            program,
            "1.5" if "while True" in program else "20",
        ],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "TMPDIR": str(scratch)},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout
    assert list(scratch.iterdir()) == []


def test_an_interpreter_below_tmp_is_there_too():
    ask = f"from megarl.sandbox.run import *\nprint(run('print(6 * 7)', b'', {LIMITS}, 'namespaces'))"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        python = f"{folder}/venv/bin/python"
        ran = subprocess.run([python, "-c", ask], env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert b"output=b'42\\n'" in ran.stdout, ran.stderr


def test_the_limit_of_cpu_time_is_a_timeout():
    finished = finish("while True: pass", wall_s=60.0, cpu_s=1)
    assert (finished.end, finished.code) == ("timed_out", 128 + signal.SIGXCPU)


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="the interpreter is in no virtual environment")
def test_an_environment_that_is_a_link_has_its_interpreter(tmp_path):
    (tmp_path / "venv").symlink_to(sys.prefix)
    code = f"from megarl.sandbox.run import *; print(run('print(7)', b'', {LIMITS}, 'namespaces').output)"
    python = [str(tmp_path / "venv" / "bin" / "python"), "-c", code]
    finished = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (finished.stdout, finished.stderr) == ("b'7\\n'\n", "")
