"""Kernels of a GPU where there is none: interpreted they make the host's bytes, and they compile for a GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Not imported here: Triton complains about itself at the end of a process.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton, which is not installed: `make setup`"
)
HERE = Path(__file__).parent


def output_of(*arguments: str, **environment: str) -> str:
    """Output of a Python process that has to succeed."""
    command = [sys.executable, *arguments]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize(
    "examples",
    ["2", pytest.param("30", marks=[pytest.mark.long, pytest.mark.timeout(900)])],
    ids=["few examples", "many examples"],
)
def test_interpreted_they_make_the_bytes_of_the_host(examples):
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=800")
    output = output_of(*options, str(HERE / "interpreted_kernels.py"), TRITON_INTERPRET="1", EXAMPLES=examples)
    assert int(re.search(r"(\d+) passed", output).group(1)) >= 15


def test_they_compile_for_a_gpu_with_exact_divisions(tmp_path):
    ptx = output_of(str(HERE / "compile_kernels.py"), TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(HERE.parents[2]))
    assert ptx.count(".visible .entry move") == 5
    assert re.findall(r"\.reqntid (\d+)", ptx).count("128") == 1
    assert re.findall(r"\.maxnreg (\d+)", ptx) == ["96"]
    assert "div.rn.f32" in ptx
    for inexact in ("div.full", "div.approx", "rcp.approx", ".ftz"):
        assert inexact not in ptx, "codes would not be those of a CPU"
