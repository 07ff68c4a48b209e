"""The CUDA of a driver and of an installed torch."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.doctor.cuda_versions import driver_cuda, torch_cuda


@pytest.mark.parametrize(("answer", "version"), [("*to = 12040; return 0", "(12, 4)"), ("return 1", "None")])
def test_the_driver_is_asked_through_its_library(tmp_path: Path, answer: str, version: str) -> None:
    (tmp_path / "cuda.c").write_text(f"int cuDriverGetVersion(int *to) {{ {answer}; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=tmp_path, check=True)
    program = "from megarl.doctor.cuda_versions import driver_cuda; print(driver_cuda())"
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version


def test_without_a_driver_there_is_no_version() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert driver_cuda() is None
    else:
        pytest.skip("a driver is here")


@pytest.mark.parametrize(
    ("line", "version"), [("cuda: Optional[str] = '13.0'", (13, 0)), ("cuda: Optional[str] = None", None)]
)
def test_the_installed_torch_says_what_it_was_built_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, version: tuple[int, int] | None
) -> None:
    files = {
        "torch-2.13.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n",
        "torch/version.py": f"__all__ = ['debug', 'cuda']\ndebug = False\n{line}\nhip: Optional[str] = '7.1'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torch_cuda() == version
