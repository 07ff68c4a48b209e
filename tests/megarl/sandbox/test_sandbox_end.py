"""When a sandbox returns, all of it has ended, and nothing of it was ever open to other users."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from eventually import eventually
from sandbox_limits import LIMITS

from megarl.sandbox.run import run

ROOT = Path(__file__).parents[3]
MARK = f"of-the-sandbox-test-{os.getpid()}"
SYSTEM_PYTHON = Path("/usr/bin/python3")
"""One that the user can run whose name the programs get; this one may lie in somebody's home."""

BEGETS = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        {does}\n"
ENDINGS = {
    "writes too much": "while True: print('x' * 100_000)",
    "writes too much in six processes": BEGETS.format(does="break") + "while True: print('x' * 100_000)",
    "leaves five behind": BEGETS.format(does="time.sleep(60)"),
    "leaves five behind that ignore signals": "import signal\n"
    "for n in set(signal.valid_signals()) - {9, 17, 19}: signal.signal(n, signal.SIG_IGN)\n"
    + BEGETS.format(does="time.sleep(60)"),
}
REPEATED = f"""
import os, sys
from megarl.sandbox.run import *
isolation, program, times, mark = sys.argv[1:]
marked = f"import os, sys\\nos.execv(sys.executable, [sys.executable, '-c', {{program!r}}, {{mark!r}}])"
for _ in range(int(times)):
    print(run(marked, b"", {replace(LIMITS, processes=16)}, isolation).end, end=" ")
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in open(f"/proc/{{name}}/cmdline").read() and int(name) != os.getpid(): print("left", name)
        except (FileNotFoundError, ProcessLookupError):
            continue
"""


def run_repeatedly(isolation, program, times):
    words = [str(SYSTEM_PYTHON), "-B", "-c", REPEATED, isolation, program, str(times), MARK]
    ran = subprocess.run(words, env={"PYTHONPATH": str(ROOT)}, cwd="/", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason="needs /usr/bin/python3")
@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_sandbox_has_ended_to_its_last_process_when_it_returns(isolation, ending):
    expected = "too_much_output" if "writes" in ending else "exited"
    assert run_repeatedly(isolation, ENDINGS[ending], 6) == [expected] * 6


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_sandbox_runs_and_closes_its_folder_to_others_whatever_the_umask(umask):
    before = os.umask(umask)
    try:
        in_namespaces = run("print(1)", b"", LIMITS, "namespaces")
        ran = subprocess.run(
            [str(SYSTEM_PYTHON), "-B", "-c", SHOW_FOLDER], env={"PYTHONPATH": str(ROOT)}, cwd="/", capture_output=True
        )
    finally:
        os.umask(before)
    assert in_namespaces.output == b"1\n"
    assert ran.stdout == b"0o40700 0o100600\n", ran.stderr


SHOW_FOLDER = f"""
from megarl.sandbox.run import *
program = "import os\\nprint(*(oct(os.stat(path).st_mode) for path in ('.', 'program.py')))"
print(run(program, b"", {LIMITS}, "limits").output.decode(), end="")
"""


@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason="needs /usr/bin/python3")
@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_a_program_is_the_first_to_end_when_memory_runs_out(isolation):
    words = [str(SYSTEM_PYTHON), "-B", "-c", REPEATED, isolation, "import time; time.sleep(60)", "1", MARK]
    asking = subprocess.Popen(words, env={"PYTHONPATH": str(ROOT)}, cwd="/")
    try:
        # A program is there a moment before its score is set.
        assert eventually(lambda: [oom_score(pid) for pid in marked() if pid != asking.pid] == ["1000\n"])
        assert oom_score(asking.pid) == oom_score("self")
    finally:
        asking.kill()
        asking.wait()
    assert eventually(lambda: not marked())


def oom_score(pid):
    return Path(f"/proc/{pid}/oom_score_adj").read_text()


def marked():
    """Processes with the mark in their command line, oldest first."""
    return [each.pid for each in psutil.process_iter(["cmdline"]) if MARK in (each.info["cmdline"] or ())]
