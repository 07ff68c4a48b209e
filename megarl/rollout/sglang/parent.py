"""Processes that end with the one that started them, however it ends."""

import multiprocessing
import os
import signal

from megarl.sandbox.process_tree import die_with

PARENT_VARIABLE = "MEGARL_SGLANG_PARENT"
"""The environment variable that tells a program which process started it."""


def end_with_parent() -> None:
    """Let this process be killed when its parent ends; at once if it has."""
    parent = multiprocessing.parent_process()
    number = parent.pid if parent is not None else int(os.environ[PARENT_VARIABLE])
    assert number is not None
    die_with(number, signal.SIGKILL)
