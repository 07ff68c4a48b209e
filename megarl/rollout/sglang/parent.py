"""Processes that end with the one that started them, however it ends."""

import os
import signal

from megarl.sandbox.process_tree import die_with

PARENT_VARIABLE = "MEGARL_SGLANG_PARENT"
"""The environment variable that tells a program which process started it."""


def end_with_parent() -> None:
    """Let this process be killed when its parent ends, at once if it has; those that it starts are told of it."""
    die_with(int(os.environ[PARENT_VARIABLE]), signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
