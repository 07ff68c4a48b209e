"""Points that a rank passes in a transfer, and what is made to happen there."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from played_cuda import OUT_OF_MEMORY

from megarl.resharding.direct import connections
from megarl.resharding.direct import receiver as receiving
from megarl.resharding.direct import sender as sending
from megarl.resharding.direct.connections import Link
from megarl.resharding.direct.wire import Acknowledgement, Announcement
from megatron_ext import cuda_memory


def _kill(*_, **_options):
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_, **_options):
    # To this thread: what the process gets another thread may take, and this one goes on for a while.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _fail(*_, **_options):
    raise RuntimeError("on purpose")


def _fail_late(*_, **_options):
    _linger()
    _fail()


def _corrupt(blocks, **_):
    blocks[-1].memory[-1] ^= 1


def _garble(blocks, **_):
    for block in blocks:
        block.memory.fill_(0x3D)


def _linger(*_, **_options):
    time.sleep(1.0)


def _fill_gpu(*_, **_options):
    # Torch's own memory is given back, and asked for again.
    cuda_memory.runtime().refusals["cudaMalloc"] = [OUT_OF_MEMORY] * 2


def wait_until_still(pid, *_, **_options):
    """Wait for all threads of a process: one may go on for a while after another has stopped."""
    deadline = time.monotonic() + 120
    while _states(pid) != {"T"}:
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.01)


def _states(pid):
    """The states of a process's threads, as Linux calls them."""
    found = set()
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found.add(each.read_text().rpartition(")")[2].split()[0])
    return found


ACTIONS = {
    "linger": _linger,
    "kill": _kill,
    "stop": _stop,
    "fail": _fail,
    "fail late": _fail_late,
    "corrupt": _corrupt,
    "garble": _garble,
    "fill the GPU": _fill_gpu,
}
POINTS = {
    "accept": (sending.Listener, "accept", None),
    # A source that has its transport, and did not offer it yet.
    "joined": (sending, "shared_tensors", None),
    "packed": (sending, "pack", None),
    "announced": (Link, "send", Announcement),
    "came": (receiving.Receiver, "__init__", None),
    "connected": (receiving, "digest", None),
    # A destination that has taken up what sources offered, and did not say so yet.
    "taken up": (receiving, "zero_copy_pieces", None),
    "heard": (receiving.Receiver, "_check", None),
    "unpacked": (receiving, "unpack", None),
    "acknowledged": (Link, "send", Acknowledgement),
    "notified": (connections, "notify_failure", None),
}


def break_at(point, count, action):
    """In this process, after the `count`-th time that `point` was passed, from now on: `action`."""
    owner, name, kind = POINTS[point]
    original, passed = getattr(owner, name), 0

    def breaking(*arguments, **options):
        nonlocal passed
        result = original(*arguments, **options)
        if kind is None or isinstance(arguments[-1], kind):
            passed += 1
            if passed == count:
                ACTIONS[action](*arguments, **options)
        return result

    setattr(owner, name, breaking)
