"""Make .venv-megatron-next: the newest supported megatron-core, and what the tests of megatron_ext need.

It uses a Python supported by this megatron-core, which may differ from .venv's. Needs only a Python itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from distributions import find_distributions, find_faults, read_lock
from setup_environment import ROOT, TORCH_INDEX, SetupError, python_version, run_alone, say

VENV = ROOT / ".venv-megatron-next"
LOCK = ROOT / "constraints" / "megatron-next.txt"
VERSION = "3.12"
"""Python of the environment: newer ones are untested with this megatron-core and the lock file."""


def candidates() -> Iterator[Path]:
    """Interpreters that may be `VERSION`: this one, those on the PATH, and pyenv's."""
    yield Path(sys.executable)
    name = f"python{VERSION}"
    if found := shutil.which(name):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{VERSION}.*/bin/{name}"))


def find_python() -> Path:
    """The first interpreter of `VERSION` that runs. Raises SetupError if there is none."""
    for candidate in candidates():
        if python_version(candidate) == VERSION:
            return candidate
    raise SetupError(
        f"this megatron-core needs Python {VERSION}, and none was found on the PATH or below pyenv's folder: install it"
        f" (`apt-get install python{VERSION} python{VERSION}-venv`, or `pyenv install {VERSION}`) and run this again"
    )


def pip(*arguments: str) -> bool:
    """Run pip in the environment, quietly; return whether it succeeded."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run([*command, "--quiet"], cwd=ROOT).returncode == 0


def install_torch(version: str) -> None:
    """Install PyTorch's wheel for CPUs or, if its index is unreachable, PyPI's for CUDA, which also runs on CPUs."""
    locked = ("install", "--no-deps", f"torch=={version}")
    if pip(*locked, "--retries", "1", "--index-url", TORCH_INDEX["cpu"]):
        return
    say(f"torch {version}: no wheel for CPUs can be had here; taking PyPI's for CUDA, 3 GB with what it needs")
    if not pip("install", f"torch=={version}", "--constraint", str(LOCK)):
        raise SetupError("torch could not be installed, as pip says above; run the same command again")


def set_up() -> None:
    """Create or repair the environment. Raises SetupError with one sentence if that fails."""
    wanted = read_lock(LOCK)
    if python_version(VENV / "bin" / "python") != VERSION:
        python = find_python()
        shutil.rmtree(VENV, ignore_errors=True)
        say(f"making {VENV.name} with {python}")
        subprocess.run([str(python), "-m", "venv", str(VENV)], check=True)
    site_packages = VENV / "lib" / f"python{VERSION}" / "site-packages"
    if "torch" in find_faults(site_packages, {"torch": wanted["torch"]}):
        install_torch(wanted["torch"])
    faults = find_faults(site_packages, wanted)
    if faults:
        say(f"installing {len(faults)} packages")
        others = [f"{name}=={wanted[name]}" for name in sorted(faults)]
        if not pip("install", "--no-deps", "--force-reinstall", *others):
            raise SetupError("the packages could not be installed, as pip says above; run the same command again")
    if faults := find_faults(site_packages, wanted):
        raise SetupError(f"after the install {VENV.name} is not in order: {faults}; remove it and run this again")
    found = find_distributions(site_packages)
    say(f"{VENV.name} is ready ({len(found)} packages)")


if __name__ == "__main__":
    sys.exit(run_alone(set_up))
