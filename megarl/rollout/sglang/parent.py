"""Ties the life of a process to its parent's."""

import os
import signal

from megarl.sandbox.process_tree import die_with

PARENT_VARIABLE = "MEGARL_SGLANG_PARENT"
"""The environment variable with the process ID of the parent."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends, at once if it already has; its children will know its ID."""
    die_with(int(os.environ[PARENT_VARIABLE]), signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
