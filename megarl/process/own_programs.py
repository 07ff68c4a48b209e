"""Makes a process find the programs and modules of its own environment, even if that is not activated."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

SAFE_PATH: Mapping[str, str] = {"PYTHONSAFEPATH": "1"}
"""Environment of a Python that imports nothing from the current folder, which may contain a `json.py`.

Processes inherit it, including those that a library starts by `python -m` or `-c`. Python before 3.11 ignores it.
"""


def with_programs_of(python: str, environment: Mapping[str, str]) -> str:
    """Return the PATH of `environment` with the interpreter's folder in front."""
    own = str(Path(python).parent)
    others = [each for each in environment.get("PATH", "").split(os.pathsep) if each not in ("", own)]
    return os.pathsep.join([own, *others])


def find_own_programs() -> None:
    """Let this process and its children find programs installed beside Python, such as ninja.

    FlashInfer, whose kernels engines compile on GPUs at first use, runs ninja by name.
    """
    os.environ["PATH"] = with_programs_of(sys.executable, os.environ)
