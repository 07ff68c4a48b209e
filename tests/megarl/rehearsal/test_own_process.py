"""The process in which ranks are rehearsed, whatever lies in the folder that a command is called in."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from converters.errors import UserError
from megarl.rehearsal.own_process import OwnProcesses

WAITS = """
import time
from pathlib import Path

def wait(file):
    Path(file).touch()
    time.sleep(600)
"""
# Two calls at once, as a rehearsal makes them: one in a thread, one in the main thread.
PROGRAM = """
from concurrent.futures import ThreadPoolExecutor
from megarl.rehearsal.own_process import OwnProcesses
with ThreadPoolExecutor(1) as pool, OwnProcesses() as processes:
    coming = pool.submit(processes.call, "waits", "wait", "first")
    processes.call("waits", "wait", "second")
"""


def test_it_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("def dumps(_value):\n    return 'of another'")
    monkeypatch.chdir(tmp_path)
    assert OwnProcesses().call("json", "dumps", [1]) == "[1]"


def test_one_that_the_system_kills_is_said_to_lack_memory():
    with pytest.raises(
        UserError, match=r"killed the process of signal\.raise_signal, as it does where memory runs out"
    ):
        OwnProcesses().call("signal", "raise_signal", signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with -11"):
        OwnProcesses().call("signal", "raise_signal", signal.SIGSEGV)


@pytest.mark.parametrize(
    ("send", "number", "tracebacks"),
    # Ctrl-C goes to the whole group.
    [(os.kill, signal.SIGKILL, 0), (os.killpg, signal.SIGINT, 1), (os.kill, signal.SIGINT, 1)],
    ids=["killed", "Ctrl-C", "SIGINT"],
)
def test_its_processes_end_with_the_one_that_called(send, number, tracebacks, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    started = {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], **started) as caller:
        called = []
        try:
            while not all((tmp_path / name).exists() for name in ("first", "second")):
                assert caller.poll() is None, caller.stderr.read()
                time.sleep(0.05)
            called = psutil.Process(caller.pid).children()
            assert len(called) == 2
            send(caller.pid, number)
            _, alive = psutil.wait_procs([psutil.Process(caller.pid), *called], timeout=30)
            assert alive == []
        finally:
            for process in (caller, *called):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        # Its own, and none of the processes that it called.
        assert caller.stderr.read().count("Traceback") == tracebacks


def test_a_failure_does_not_wait_for_calls_in_other_threads():
    calls = []

    def fail():
        with ThreadPoolExecutor(2) as pool, OwnProcesses() as processes:
            calls.extend(pool.submit(processes.call, "time", "sleep", 100) for _ in range(2))
            raise UserError("it does not fit")

    began = time.monotonic()
    with pytest.raises(UserError, match="it does not fit"):
        fail()
    assert time.monotonic() < began + 60
    assert all(isinstance(call.exception(), UserError) for call in calls)
