import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from eventually import eventually
from process_tree import PeakMemory, ProcessTree

_BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"


Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def run(program: str) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    yield run
    for process in started:
        with process:  # which closes its pipes and waits
            process.kill()


def test_cpu_seconds_of_a_descendant_that_has_ended_still_count(start: Start) -> None:
    child = _BURN.format(seconds=0.6) + "print('burnt', flush=True)\ninput()"
    parent = start(
        f"import subprocess, sys\nchild = [sys.executable, '-c', {child!r}]\n"
        "subprocess.run(child)\nprint('ended', flush=True)\nsys.stdin.read()"
    )
    tree = ProcessTree(parent.pid)
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"burnt\n"
    before = tree.cpu_seconds()
    parent.stdin.write(b"\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == b"ended\n"
    after = tree.cpu_seconds()
    parent.stdin.close()
    parent.wait()
    assert before >= 0.6
    assert after >= before
    assert tree.cpu_seconds() >= after


def test_memory_counts_what_a_descendant_holds(start: Start) -> None:
    hold = "held = b'x' * 200_000_000\nprint('held', flush=True)\ninput()"
    parent = start(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {hold!r}])")
    tree = ProcessTree(parent.pid)
    assert parent.stdout is not None
    with PeakMemory(tree, every_s=0.05) as peak:
        assert parent.stdout.readline() == b"held\n"
        assert eventually(lambda: peak.bytes >= 200_000_000)
        assert parent.stdin is not None
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        parent.wait()
    assert 200_000_000 <= peak.bytes < 400_000_000
    assert tree.memory_bytes() == 0
