"""Processes that end with the one that started them, however it ends."""

import ctypes
import multiprocessing
import os
import signal

PARENT_VARIABLE = "MEGARL_SGLANG_PARENT"
"""The environment variable that tells a program which process started it."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let this process be killed when its parent ends; at once if it has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if os.getppid() != (parent.pid if parent else int(os.environ[PARENT_VARIABLE])):
        os.kill(os.getpid(), signal.SIGKILL)
