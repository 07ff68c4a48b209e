"""Where SGLang is looked for, and what has to be there."""

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.rollout.sglang.installation import (
    KERNELS,
    OF_MEGARL,
    PACKAGES,
    PYTHON_VARIABLE,
    SET_UP,
    installation,
    installed_versions,
)

OF_SGLANG = {"aiohttp", "packaging", "psutil", "pyyaml", "torch", "transformers"}
"""Packages that both need."""
IN_ITS_PROCESSES = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
for name in ("arguments", "hooks", "worker", "cpu"):
    importlib.import_module("megarl.rollout.sglang." + name)
"""


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))


@pytest.fixture
def python_with(tmp_path, monkeypatch):
    """Makes a Python that tells of these packages alone, of version 1.0, and has it named."""

    def make(*names, path=tmp_path / "python"):
        about = tmp_path / "packages"
        for name in names:
            folder = about / f"{name.replace('-', '_')}-1.0.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        path.parent.mkdir(parents=True, exist_ok=True)
        ask = "import sys; sys.path[:] = [sys.argv[1]] + [each for each in sys.path if 'site-packages' not in each]"
        shift = "code = sys.argv[3]; sys.argv[1:] = sys.argv[4:]; exec(code)"
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{ask}; {shift}" {about} "$@"\n')
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_no_installation_is_told_with_what_to_do(tmp_path, on):
    with pytest.raises(
        UserError, match=f"SGLang is not installed: run {re.escape(SET_UP[on])}, or let {PYTHON_VARIABLE}"
    ):
        installation(on)
    assert installed_versions(["sglang"]) == {}


def test_packages_beside_those_of_megarl_are_found(tmp_path):
    packages = tmp_path / PACKAGES / "sglang"
    packages.mkdir(parents=True)
    python, paths = installation()
    assert (python, paths[0]) == (sys.executable, str(packages.parent))
    assert (Path(paths[1]) / "megarl").is_dir()


def test_an_environment_beside_that_of_megarl_is_found(tmp_path, python_with):
    own = python_with("sglang", path=tmp_path / PACKAGES / "bin" / "python")
    python, paths = installation()
    assert python == own
    assert [(Path(path) / "megarl").is_dir() for path in paths] == [True]
    assert installed_versions(["sglang", "isal"]) == {"sglang": "1.0"}


def test_a_python_that_is_named_without_its_folder_is_one_on_the_path(tmp_path, python_with, monkeypatch):
    """Its folder, and not the one that a run is started in, comes first on the PATH of the server."""
    python = python_with("sglang")
    monkeypatch.setenv(PYTHON_VARIABLE, "python")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert installation()[0] == python
    monkeypatch.setenv(PYTHON_VARIABLE, "nowhere")
    assert installation()[0] == "nowhere"


def test_what_it_says_is_not_read_with_modules_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, os.path.realpath(sys.executable))
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert installed_versions(["pip"]).keys() == {"pip"}


def test_on_a_gpu_it_needs_kernels_and_what_megarl_needs_there(python_with, monkeypatch):
    monkeypatch.setenv(PYTHON_VARIABLE, python_with("sglang", *OF_MEGARL[1:]))
    assert installation()[0].endswith("python")
    words = f"there is no {KERNELS}, no {OF_MEGARL[0]}, without which it serves on no GPU: run {SET_UP['cuda']}, or"
    with pytest.raises(UserError, match=re.escape(words)):
        installation("cuda")
    monkeypatch.setenv(PYTHON_VARIABLE, python_with(KERNELS, OF_MEGARL[0]))
    assert installation("cuda")[0].endswith("python")


def test_packages_that_were_installed_for_a_cpu_do_not_serve_on_a_gpu(tmp_path):
    (tmp_path / PACKAGES / "sglang").mkdir(parents=True)
    with pytest.raises(UserError, match=f"there is no {KERNELS}, without which it serves on no GPU: run rm -rf"):
        installation("cuda")


def test_what_megarl_needs_in_processes_of_sglang_is_known():
    named = {re.split(r"[<>=!\[; ]", each)[0] for each in requires("megarl") or [] if "extra" not in each}
    absent = named - OF_SGLANG - {*OF_MEGARL}
    modules = {module for module, names in packages_distributions().items() if {*names} & absent}
    assert {"ray", "hydra", "megatron"} <= modules
    subprocess.run([sys.executable, "-c", IN_ITS_PROCESSES.format(absent=modules)], check=True)
