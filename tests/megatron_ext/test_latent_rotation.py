"""The rotation of latent attention's heads on GPUs, as its launches and its machine code show it."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Not imported here: Triton complains about itself at the end of a process.
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which is not installed: `make setup`"),
    # Compiles for half a minute what other versions of megatron-core or Triton alone would change.
    pytest.mark.long,
]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "compile_latent_rotation.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def test_a_gpu_reads_all_that_it_rotates_in_place_before_it_writes(compiled: str) -> None:
    """One warp alone, whose reads come before its writes: others would not wait for it."""
    kernels = re.split(r"(?=^\.version)", compiled, flags=re.MULTILINE)[1:]
    assert len(kernels) == 10
    for ptx in kernels:
        reads = [found.start() for found in re.finditer(r"ld\.global\S*b16", ptx)]
        writes = [found.start() for found in re.finditer(r"st\.global", ptx)]
        assert ".reqntid 32" in ptx
        assert reads
        assert max(reads) < min(writes)


def test_blocks_of_heads_are_full(compiled: str) -> None:
    assert re.findall(r"^of 12: (.*)$", compiled, flags=re.MULTILINE) == ["1 2 4"] * 4


def test_tokens_are_found_behind_2_31_numbers(compiled: str) -> None:
    found = re.findall(r"^offsets: (.*)$", compiled, flags=re.MULTILINE)
    assert found == ["i64"] * 2 + ["i64 i64 i64 i64"] * 2
