"""Kernels of a GPU where there is none: interpreted they make the host's bytes, and they compile for a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is not installed: `make setup`")
HERE = Path(__file__).parent


def test_interpreted_they_make_the_bytes_of_the_host():
    file = HERE / "interpreted_kernels.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) >= 15


@pytest.mark.parametrize("to_bucket", [True, False])
def test_they_compile_for_a_gpu(to_bucket, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megarl.resharding.kernels.triton_kernels import move

    signature = dict(zip(move.arg_names, ("*i64", "*i32", "*i64", "constexpr", "constexpr"), strict=True))
    source = ASTSource(move, signature, constexprs={(3,): to_bucket, (4,): True}, attrs={})
    options = {"num_warps": 8, "enable_fp_fusion": False}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ("div.rn.f32" in kernel.asm["ptx"]) == to_bucket
    for inexact in ("div.full", "div.approx", "rcp.approx", ".ftz"):
        assert inexact not in kernel.asm["ptx"], "codes would not be those of a CPU"
