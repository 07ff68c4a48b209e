"""Tasks of a Slurm job without a Slurm: which signals reach the program, and nodes that never arrive."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from distributions import read_lock

from converters.errors import UserError
from megarl.cluster.ray.slurm import _CACHES, _end_of, _environment_of_node, wait_for_nodes
from megarl.process.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
# Writes down what it hears, and ends with code 143 as a run that has saved.
_PROGRAM = """
import signal, sys, time
said = open(sys.argv[1], "a", buffering=1)
def saves(number, frame):
    said.write(f"{number}\\n")
    time.sleep(0.5)
    sys.exit(143)
signal.signal(signal.SIGTERM, saves)
said.write("started\\n")
time.sleep(60)
"""
_TASK = """
import os, sys
from megarl.cluster.ray.slurm import _COMMAND_HEARS, Supervised
sys.exit(Supervised(sys.argv[1:], _COMMAND_HEARS, os.environ).wait())
"""


@pytest.fixture
def task(tmp_path):
    """A task with a program, in a process group that signals go to as Slurm sends them."""
    heard = tmp_path / "heard"
    started = subprocess.Popen(
        [sys.executable, "-c", _TASK, sys.executable, "-c", _PROGRAM, str(heard)], start_new_session=True
    )
    deadline = time.monotonic() + 240
    while not heard.exists() or not heard.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield started, heard
    started.kill()
    started.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_reaches_the_program_once_and_as_sigterm(task, number):
    started, heard = task
    os.killpg(started.pid, number)
    time.sleep(0.1)
    os.killpg(started.pid, signal.SIGTERM)
    assert started.wait(timeout=120) == 143
    assert heard.read_text() == f"started\n{int(signal.SIGTERM)}\n"


def test_the_end_at_once_is_that_of_ctrl_c(task):
    started, heard = task
    started.send_signal(signal.SIGUSR2)
    assert started.wait(timeout=120) == 128 + signal.SIGINT
    assert heard.read_text() == "started\n"


def test_a_program_does_not_outlive_its_task(task):
    started, _ = task
    (program,) = psutil.Process(started.pid).children()
    started.kill()
    _, alive = psutil.wait_procs([program], timeout=60)
    assert alive == []


def test_nodes_that_never_arrive_are_named():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"^after 0\.1 s n1, n2 had not joined .* {address}: .*--exclude=n1,n2\)"):
        wait_for_nodes(address, ["n1", "n2"], 0.1)


@pytest.mark.parametrize(("restarts", "code"), [("0", 2), ("1", 1)])
def test_a_job_that_had_all_of_its_nodes_before_is_not_ended_by_one_that_does_not_come(restarts, code):
    task = (
        "-m",
        "megarl.cluster.ray.slurm",
        "run",
        f"127.0.0.1:{free_port()}",
        "--nodes",
        "n1",
        "--timeout",
        "0.1",
        "--",
    )
    environment = {**os.environ, "SLURM_RESTART_COUNT": restarts}
    done = subprocess.run([sys.executable, *task, "true"], env=environment, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.startswith("megarl: after 0.1 s n1 had not joined the Ray cluster")


def test_an_interface_that_a_node_does_not_have_is_one_sentence():
    task = ("-m", "megarl.cluster.ray.slurm", "node", "192.0.2.1:6379", "--head", "n1", "--interface=absent0")
    environment = {**os.environ, "SLURMD_NODENAME": "n2", "SLURM_CPUS_ON_NODE": "1"}
    done = subprocess.run([sys.executable, *task], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "has no interface 'absent0' with an IPv4 address" in line


_NODE_WITHOUT_RAY = """
import sys
from megarl.cluster.ray import slurm
slurm._ray_start = lambda *_: ["sh", "-c", "echo no room for Ray; exit 3"]
sys.exit(slurm.main(["node", "192.0.2.1:6379", "--head", "n1"]))
"""


@pytest.mark.parametrize(("restarts", "code"), [("0", 2), ("1", 1)])
def test_nobody_waits_for_a_node_whose_ray_has_ended(tmp_path, restarts, code):
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "SLURM_RESTART_COUNT": restarts}
    node = subprocess.run(
        [sys.executable, "-c", _NODE_WITHOUT_RAY],
        env={**environment, "SLURMD_NODENAME": "n2"},
        capture_output=True,
        text=True,
    )
    assert (node.returncode, node.stderr) == (3, "n2: Ray ended by itself with exit code 3:\nno room for Ray\n")
    waits = ("run", f"127.0.0.1:{free_port()}", "--nodes", "n1", "n2", "--timeout", "1000", "--", "true")
    run = subprocess.run(
        [sys.executable, "-m", "megarl.cluster.ray.slurm", *waits],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == code
    assert run.stderr.startswith("megarl: Ray ended by itself on n2 before all nodes had joined: ")


def test_an_end_before_the_job_was_in_the_queue_again_is_over(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    ended = _end_of("n2")
    ended.touch()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(UserError, match=r"^after 0\.1 s n1, n2 had not joined"):
        wait_for_nodes(f"127.0.0.1:{free_port()}", ["n1", "n2"], 0.1)


def test_compiled_kernels_lie_on_the_node_and_not_in_a_home_that_all_share(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/local/cache")
    environment = _environment_of_node(tmp_path)
    assert environment["TRITON_CACHE_DIR"] == f"{environment['TMPDIR']}/triton"
    assert environment["XDG_CACHE_HOME"] == "/local/cache"


# As the sources of the pinned versions say; DeepGEMM is in vLLM.
_KEEPS_KERNELS_AT_HOME = {
    "apache-tvm-ffi": {"TVM_FFI_CACHE_DIR"},
    "cuda-core": {"XDG_CACHE_HOME"},
    "cuda-tile": {"XDG_CACHE_HOME"},
    "flashinfer-python": {"FLASHINFER_WORKSPACE_BASE"},
    "humming-kernels": {"HUMMING_CACHE_DIR", "HUMMING_TMP_DIR"},
    "numba": {"XDG_CACHE_HOME"},
    "nvidia-cuda-runtime": {"CUDA_CACHE_PATH"},
    "nvidia-cudnn-frontend": {"XDG_CACHE_HOME"},
    "quack-kernels": {"QUACK_CACHE_DIR"},
    "sglang": {"SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR"},
    "tilelang": {"TILELANG_CACHE_DIR"},
    "tokenspeed-triton": {"TRITON_CACHE_DIR"},
    "torch": {"XDG_CACHE_HOME"},
    "triton": {"TRITON_CACHE_DIR"},
    "vllm": {"XDG_CACHE_HOME"},
}


def test_no_package_of_the_gpu_stack_compiles_kernels_into_a_home_that_all_share(tmp_path, monkeypatch):
    locked = {name for lock in ("cuda", "sglang") for name in read_lock(ROOT / "constraints" / f"{lock}.txt")}
    assert _KEEPS_KERNELS_AT_HOME.keys() <= locked
    variables = set().union(*_KEEPS_KERNELS_AT_HOME.values())
    assert variables == set(_CACHES)
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    environment = _environment_of_node(tmp_path)
    assert all(environment[variable].startswith(f"{environment['TMPDIR']}/") for variable in variables)
    documented = (ROOT / "docs" / "cluster.md").read_text()
    assert [variable for variable in sorted(variables) if f"`{variable}`" not in documented] == []
