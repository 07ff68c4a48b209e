"""Where SGLang is installed: in an environment beside megarl's, which needs other versions of some packages."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from converters.errors import UserError

PACKAGES = ".venv-sglang"
"""The folder beside megarl's environment that has SGLang, and what it needs in other versions than megarl."""
PYTHON_VARIABLE = "MEGARL_SGLANG_PYTHON"
"""The environment variable that names the Python of another environment that has SGLang."""
SET_UP = "make setup SGLANG=1"
_ROOT = Path(__file__).resolve().parents[3]
_ASK = "from importlib.metadata import version; print(version('sglang'))"
_ASK_S = 60


def installation() -> tuple[str, list[str]]:
    """The Python that has SGLang, and the folders for its PYTHONPATH. Raises UserError where there is none."""
    if python := os.environ.get(PYTHON_VARIABLE):
        return python, [str(_ROOT)]
    packages = Path(sys.prefix).parent / PACKAGES
    if (packages / "sglang").is_dir():
        return sys.executable, [str(packages), str(_ROOT)]
    if find_spec("sglang") is not None:
        return sys.executable, [str(_ROOT)]
    raise UserError(
        f"rollout.engine=sglang, and SGLang is not installed: run {SET_UP}, or let"
        f" {PYTHON_VARIABLE} name the Python of an environment that has it"
    )


def installed_version() -> str | None:
    """The version of SGLang that `installation` leads to; None where there is none, or its Python does not run."""
    try:
        python, folders = installation()
    except UserError:
        return None
    if python == sys.executable:
        found = distributions(name="sglang", path=[*folders, *sys.path])
        return next((each.version for each in found), None)
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None
