"""Finds SGLang's own Python environment: it needs other versions of some packages than megarl."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from converters.errors import UserError
from megarl.process.own_programs import SAFE_PATH

PACKAGES = ".venv-sglang"
"""The folder beside megarl's environment that has SGLang.

On a CPU it has what megarl's environment lacks or has in another version; on CUDA it is a full environment with its own
torch.
"""
PYTHON_VARIABLE = "MEGARL_SGLANG_PYTHON"
"""The environment variable that names the Python of another environment that has SGLang."""
SET_UP: Mapping[str, str] = {
    "cpu": "make setup SGLANG=1",
    "cuda": f"rm -rf {PACKAGES}; make setup CUDA=1 SGLANG=1",
}
"""Device -> the command that installs it; on CUDA it replaces a folder that was made for a CPU."""
KERNELS = "sglang-kernel"
"""The package with SGLang's GPU kernels, without which its server does not start on a GPU."""
OF_MEGARL = ("isal", "llvmlite", "numpy", "omegaconf", "pyarrow", "safetensors")
"""Packages that megarl's code in SGLang's processes needs besides torch."""
_ROOT = Path(__file__).resolve().parents[3]
_ASK = """
import json, sys
from importlib.metadata import distributions
found = {name: [each.version for each in distributions(name=name)] for name in sys.argv[1:]}
print(json.dumps({name: versions[0] for name, versions in found.items() if versions}))
"""
_ASK_S = 60


def installation(on: str = "cpu") -> tuple[str, list[str]]:
    """Return the Python that has SGLang, and the folders for its PYTHONPATH. Raises UserError if there is none.

    For `on` cuda, also raises UserError if the environment lacks packages needed there.
    """
    python, folders = _found(on)
    versions = _versions(python, folders, (KERNELS, *OF_MEGARL)) if on == "cuda" else None
    if versions is not None and (lacking := [name for name in (KERNELS, *OF_MEGARL) if name not in versions]):
        raise UserError(
            f"rollout.engine=sglang: beside the SGLang of {python} there is no {', no '.join(lacking)}, without which"
            f" it serves on no GPU: {_advice(on)}"
        )
    return python, folders


def installed_versions(names: Sequence[str]) -> Mapping[str, str]:
    """The versions of those of these packages that SGLang's environment has; empty if there is no working one."""
    try:
        python, folders = _found("cpu")
    except UserError:
        return {}
    return _versions(python, folders, names) or {}


def _found(on: str) -> tuple[str, list[str]]:
    if python := os.environ.get(PYTHON_VARIABLE):
        # Resolved to a full path, because the server's PATH begins with its folder.
        return shutil.which(python) or python, [str(_ROOT)]
    packages = Path(sys.prefix).parent / PACKAGES
    if (own := packages / "bin" / "python").is_file():
        return str(own), [str(_ROOT)]
    if (packages / "sglang").is_dir():
        return sys.executable, [str(packages), str(_ROOT)]
    if find_spec("sglang") is not None:
        return sys.executable, [str(_ROOT)]
    raise UserError(f"rollout.engine=sglang, and SGLang is not installed: {_advice(on)}")


def _advice(on: str) -> str:
    return f"run {SET_UP[on]}, or let {PYTHON_VARIABLE} name the Python of an environment that has it"


def _versions(python: str, folders: Sequence[str], names: Sequence[str]) -> Mapping[str, str] | None:
    """The versions of those of these packages that are installed; None if the Python does not run."""
    if python == sys.executable:
        path = [*folders, *sys.path]
        found = {name: next((each.version for each in distributions(name=name, path=path)), "") for name in names}
        return {name: version for name, version in found.items() if version}
    try:
        command, environment = [python, "-c", _ASK, *names], {**os.environ, **SAFE_PATH}
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return json.loads(asked.stdout) if asked.returncode == 0 else None
