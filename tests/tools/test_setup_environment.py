"""The parts of the set-up that need no network; the whole of it runs before these tests."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setup_environment
from distributions import canonical, read_lock
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("version", "requirements", "is_cuda"),
    [
        ("2.13.0+cpu", ["sympy>=1.13"], False),
        ("2.13.0", ["sympy>=1.13", "filelock"], False),
        ("2.13.0", ["nvidia-cublas==13; platform_system == 'Linux'", "sympy"], True),
        ("2.13.0", ["cuda-bindings>=13"], True),
        ("2.13.0+cu130", [], True),
    ],
)
def test_cuda_builds_of_torch_are_told_from_cpu_builds(version: str, requirements: list[str], is_cuda: bool) -> None:
    assert setup_environment.is_cuda_build(version, requirements) is is_cuda


def test_the_lock_meets_every_requirement_of_the_project() -> None:
    lock = read_lock(setup_environment.LOCK)
    extras = PROJECT["optional-dependencies"]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras["cpu"], *extras["dev"]]):
        version = lock[canonical(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} with {version}"


def test_the_lock_leaves_out_what_breaks_a_cpu_torch() -> None:
    assert not set(setup_environment.HARMFUL) & set(read_lock(setup_environment.LOCK))
    assert set(setup_environment.BUILD_TOOLS) <= set(read_lock(setup_environment.LOCK))


def test_the_benchmark_lock_only_adds() -> None:
    assert not set(read_lock(setup_environment.LOCK)) & set(read_lock(setup_environment.BENCHMARK_LOCK))


def test_cuda_is_refused_in_one_sentence_where_there_is_no_gpu() -> None:
    command = [sys.executable, str(ROOT / "tools" / "setup_environment.py"), "--cuda"]
    done = subprocess.run(command, env={"PATH": "/nonexistent"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("[setup] error: CUDA=1 needs an NVIDIA GPU")
    assert done.stderr.count("\n") == 1


def test_the_stamp_depends_on_everything_that_decides_a_set_up(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("one")
    second.write_text("two")
    stamps = {
        setup_environment.fingerprint([first, second], "3.11", "cpu"),
        setup_environment.fingerprint([second, first], "3.11", "cpu"),
        setup_environment.fingerprint([first], "3.11", "cpu"),
        setup_environment.fingerprint([first, second], "3.12", "cpu"),
        setup_environment.fingerprint([first, second], "3.11", "cuda"),
    }
    assert len(stamps) == 5


def test_interpreters_that_do_not_run_have_no_version(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(tmp_path / "gone")
    assert setup_environment.python_version(tmp_path / "python") is None
    assert setup_environment.python_version(sys.executable) == ".".join(map(str, sys.version_info[:2]))
