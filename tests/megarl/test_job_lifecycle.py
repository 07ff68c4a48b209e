"""Whole runs of the command: killed and resumed, interrupted, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.checkpoint_folder import complete_iterations

STEPS = 5
# What may differ between two runs of the same numbers.
TIMINGS = ("seconds/", "throughput/")
START_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    model = write_tiny_model("qwen3_moe", folder / "model")
    files = write_arithmetic(folder / "data", held_out=16)

    def build(output: Path, *overrides: str) -> list[str]:
        return [
            *(sys.executable, "-m", "megarl.cli.main", "train", "--config-name", "quickstart"),
            f"output_dir={output}",
            f"model.path={model}",
            f"data.train_files=[{files.train}]",
            f"data.eval_files=[{files.eval}]",
            f"loop.steps={STEPS}",
            "loop.prompts_per_step=8",
            "loop.samples_per_prompt=4",
            "loop.eval_every=2",
            "checkpoint.every=2",
            # With several updates, and with a reference model, there is more state to get wrong.
            "algorithm.updates_per_step=2",
            "algorithm.kl_coefficient=0.01",
            *overrides,
        ]

    return build


@pytest.fixture
def spawned():
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        kill_tree(process.pid)
        process.wait()


def test_killed_run_resumes_to_the_same_numbers(command, tmp_path, spawned):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), check=True, capture_output=True, timeout=START_TIMEOUT_S)

    run = start(command(killed), spawned)
    wait_for_line(killed, run, step=3)
    # Step 4 is under way; the last checkpoint is that of step 2.
    kill_tree(run.pid)
    assert complete_iterations(killed / "checkpoints") == [2]
    (killed / "checkpoints" / "iter_0000004.partial").mkdir()
    (killed / "checkpoints" / "iter_0000004.partial" / "common.pt").write_bytes(b"half a file")

    subprocess.run(command(killed), check=True, capture_output=True, timeout=START_TIMEOUT_S)
    assert numbers(killed) == numbers(whole)
    assert len(numbers(whole)) == STEPS + 1
    exports = [(folder / "huggingface" / "model.safetensors").read_bytes() for folder in (whole, killed)]
    assert exports[0] == exports[1]
    assert complete_iterations(killed / "checkpoints") == [4, 5]


def test_interrupted_run_ends_cleanly(command, tmp_path, spawned):
    before = leftovers()
    run = start(command(tmp_path / "run", "loop.steps=1000"), spawned)
    wait_for_line(tmp_path / "run", run, step=1)
    family = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
    listening = {connection.laddr.ip for pid in family for connection in listeners(pid)}
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "megarl: interrupted"
    assert [pid for pid in family if psutil.pid_exists(pid)] == []
    assert leftovers() <= before
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def start(arguments: list[str], spawned: list[subprocess.Popen]) -> subprocess.Popen:
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    spawned.append(process)
    return process


def wait_for_line(output: Path, run: subprocess.Popen, step: int) -> None:
    """Return when the metrics of `step` are written."""
    deadline = time.monotonic() + START_TIMEOUT_S
    metrics = output / "metrics.jsonl"
    while not (metrics.exists() and f'{{"step": {step},' in metrics.read_text()):
        assert run.poll() is None, run.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_tree(pid: int) -> None:
    if not psutil.pid_exists(pid):
        return
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        process.kill()


def numbers(output: Path) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMINGS)} for line in lines]


def listeners(pid: int) -> list:
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return []
    return [connection for connection in connections if connection.status == psutil.CONN_LISTEN]


def leftovers() -> set[str]:
    """Names of megarl's in the places where segments and sockets lie."""
    return {path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("megarl-*")}
