"""Processes that a dead one left behind, by the log that they write to: nothing of them is left when all are ended."""

import os
import platform
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
from eventually import eventually, has_ended

from megarl.process import writers
from megarl.process.writers import end_other_writers, other_writers


def test_processes_that_a_dead_one_left_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("megarl.process.writers._LEAVE_S", 0.2)
    log = tmp_path / "engine_0.log"
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with log.open("w") as output, (tmp_path / "engine_1.log").open("w") as another:
        # As one whose parent is gone.
        left = subprocess.Popen(sleep, stdout=output, start_new_session=True)
        stays = subprocess.Popen(sleep, stdout=another)
    try:
        end_other_writers(log)
        assert has_ended(psutil.Process(left.pid))
        assert not has_ended(psutil.Process(stays.pid))
    finally:
        for process in (left, stays):
            process.kill()
            process.wait()


def end_child(tmp_path, program, ready):
    """Begin a Python program that has a log as its output, and end it as one that writes to that log: how it ended."""
    log = tmp_path / "engine_0.log"
    with log.open("w") as output:
        child = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=output)
    try:
        assert eventually(lambda: ready(child, log))
        end_other_writers(log)
        return child.poll()
    finally:
        child.kill()
        child.wait()


@contextmanager
def writing_to(log):
    """A process that has a log as its output."""
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as output:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_one_of_another_container_whose_log_has_the_same_path_is_left_alone(tmp_path, monkeypatch):
    """The kernel tells the path of an output among the mounts of its process."""
    log, theirs = tmp_path / "engine_0.log", tmp_path / "of_another_container" / "engine_0.log"
    log.touch()
    asked = os.readlink
    with writing_to(theirs) as process:
        monkeypatch.setattr(os, "readlink", lambda path: str(log) if asked(path) == str(theirs) else asked(path))
        assert os.readlink(f"/proc/{process.pid}/fd/1") == str(log)
        assert list(other_writers(log)) == []


def test_one_that_has_the_log_at_another_path_is_found(tmp_path):
    log, mounted = tmp_path / "engine_0.log", tmp_path / "mounted" / "engine_0.log"
    mounted.parent.mkdir()
    log.touch()
    mounted.hardlink_to(log)
    with writing_to(mounted) as process:
        assert list(other_writers(log)) == [process.pid]


WITH_HALF_A_CHARACTER = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, "fourteen bytes\N{LATIN SMALL LETTER E WITH ACUTE}".encode())
os.close(1), os.close(2)
time.sleep(600)
"""


def test_a_process_of_any_name_keeps_none_from_being_looked_for(tmp_path):
    log = tmp_path / "engine_0.log"
    log.touch()
    other = subprocess.Popen([sys.executable, "-c", WITH_HALF_A_CHARACTER])
    try:
        name = Path(f"/proc/{other.pid}/comm")
        assert eventually(lambda: name.read_bytes().startswith(b"fourteen bytes"))
        assert list(other_writers(log)) == []
    finally:
        other.kill()
        other.wait()


EXIT_THREAD = 60 if platform.machine() == "x86_64" else 93
FIRST_THREAD_ENDS = f"""
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({EXIT_THREAD}, 0)
"""


def test_one_of_which_only_the_first_thread_has_ended_is_no_dead_process(tmp_path, monkeypatch):
    # As where another one waits in a call of a driver, which holds memory of a GPU.
    monkeypatch.setattr("megarl.process.writers._LEAVE_S", 0.2)
    ended = end_child(tmp_path, FIRST_THREAD_ENDS, lambda child, _log: psutil.Process(child.pid).status() == "zombie")
    assert ended == -signal.SIGKILL


WITHOUT_ITS_FILES = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os.closerange(0, 3))
print("began", flush=True)
time.sleep(600)
"""


def test_one_that_has_lost_its_files_and_is_there_still_is_waited_for(tmp_path, monkeypatch):
    # As the kernel takes them from it before the driver has freed what belongs to them.
    monkeypatch.setattr("megarl.process.writers._LEAVE_S", 0.2)
    look = writers.other_writers

    def look_before_it_closes(log):
        for pid in look(log):
            os.kill(pid, signal.SIGUSR1)
            assert eventually(lambda pid=pid: not os.path.lexists(f"/proc/{pid}/fd/1"))
            yield pid

    monkeypatch.setattr(writers, "other_writers", look_before_it_closes)
    assert end_child(tmp_path, WITHOUT_ITS_FILES, lambda _child, log: log.read_text()) == -signal.SIGKILL
