"""Programs of the environment that a process runs in, where nobody has activated it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def with_programs_of(python: str, environment: Mapping[str, str]) -> str:
    """The PATH of `environment`, begun with the folder of an interpreter, unless it is in there."""
    own, given = str(Path(python).parent), environment.get("PATH", "")
    return given if own in given.split(os.pathsep) else os.pathsep.join(filter(None, [own, given]))


def find_own_programs() -> None:
    """Let this process, and those that it starts, find what is installed beside Python, such as ninja.

    FlashInfer's kernels, which engines compile on GPUs at their first use, ask for it by name.
    """
    os.environ["PATH"] = with_programs_of(sys.executable, os.environ)
