"""Lets a process end together with its parent, however the parent ends."""

import os
import signal

from megarl.sandbox.process_tree import die_with

PARENT_VARIABLE = "MEGARL_SGLANG_PARENT"
"""The environment variable that tells a program which process started it."""


def end_with_parent() -> None:
    """Let this process be killed when its parent ends, at once if it has; its children learn its number."""
    die_with(int(os.environ[PARENT_VARIABLE]), signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
