"""Programs and modules of the environment that a process runs in, where nobody has activated it."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

SAFE_PATH: Mapping[str, str] = {"PYTHONSAFEPATH": "1"}
"""Environment of a Python that imports nothing from the current folder, where a `json.py` may lie.

Also of each that a library starts by `python -m` or `-c`, as for processes of its own. Before 3.11 Python knows it not.
"""


def with_programs_of(python: str, environment: Mapping[str, str]) -> str:
    """The PATH of `environment`, with the folder of an interpreter before all others."""
    own = str(Path(python).parent)
    others = [each for each in environment.get("PATH", "").split(os.pathsep) if each not in ("", own)]
    return os.pathsep.join([own, *others])


def find_own_programs() -> None:
    """Let this process, and those that it starts, find what is installed beside Python, such as ninja.

    FlashInfer's kernels, which engines compile on GPUs at their first use, ask for it by name.
    """
    os.environ["PATH"] = with_programs_of(sys.executable, os.environ)
