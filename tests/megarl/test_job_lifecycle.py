"""Whole runs of the command: killed and resumed, interrupted, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.checkpoint_folder import complete_iterations

CHECKPOINT, LAST_STEP = 3, 5
# What may differ between two runs of the same numbers.
TIMINGS = ("seconds/", "throughput/")
START_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    model = write_tiny_model("qwen3_moe", folder / "model")
    files = write_arithmetic(folder / "data", held_out=16)

    def build(output: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "megarl.cli.main", "train", "--config-name", "quickstart"),
            f"output_dir={output}",
            f"model.path={model}",
            f"data.train_files=[{files.train}]",
            f"data.eval_files=[{files.eval}]",
            "loop.steps=1000",
            "loop.prompts_per_step=8",
            "loop.samples_per_prompt=4",
            "loop.eval_every=2",
            f"checkpoint.every={CHECKPOINT}",
            # Several updates, a critic, a reference that is not the model's folder any more and a coefficient that
            # adapts: there is more state to get wrong. The reward is one that an untrained model gets at times.
            f"reward.function={Path(__file__).with_name('digits.py')}:begins_with_a_digit",
            "algorithm.updates_per_step=2",
            "+algorithm=ppo",
            "critic.ranks=1",
            "critic.megatron.expert_model_parallel_size=1",
            "algorithm.kl_in=reward",
            "algorithm.kl_coefficient=0.01",
            "algorithm.kl_target=0.01",
            "algorithm.kl_horizon=32",
            "algorithm.refresh_reference_every=2",
        ]

    return build


@pytest.fixture
def spawned():
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        kill_tree(process.pid)
        process.wait()


def test_a_killed_run_resumes_to_the_same_numbers_and_ends_cleanly_when_interrupted(command, tmp_path, spawned):
    output = tmp_path / "run"
    killed = start(command(output), spawned)
    wait_for_line(output, killed, LAST_STEP)
    assert leftovers(killed.pid)
    # The next step is under way; the last two of the steps that are done are lost.
    kill_tree(killed.pid)
    killed.wait()
    assert complete_iterations(output / "checkpoints") == [CHECKPOINT]
    (output / "checkpoints" / "iter_0000006.partial").mkdir()
    (output / "checkpoints" / "iter_0000006.partial" / "common.pt").write_bytes(b"half a file")
    uninterrupted = lines(output)

    resumed = start(command(output), spawned)
    wait_for_line(output, resumed, LAST_STEP + 1)
    check_that_an_interrupt_ends_it_cleanly(resumed)
    # What a killed run cannot remove, the next one does.
    assert leftovers(killed.pid) == leftovers(resumed.pid) == []
    again = lines(output)[: len(uninterrupted)]
    assert len(again) == LAST_STEP + 1
    assert again[CHECKPOINT + 1] != uninterrupted[CHECKPOINT + 1], "steps after the checkpoint are done again"
    assert numbers(again) == numbers(uninterrupted)
    assert len({line["policy/kl_coefficient"] for line in again[1:]}) == LAST_STEP
    assert any(line["reward/std"] > 0 for line in again[CHECKPOINT + 1 :])


def check_that_an_interrupt_ends_it_cleanly(run: subprocess.Popen) -> None:
    family = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
    listening = {connection.laddr.ip for pid in family for connection in listeners(pid)}
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "megarl: interrupted"
    assert [pid for pid in family if psutil.pid_exists(pid)] == []
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
        # One may have ended since: a writer of a checkpoint, or what its parent ends.
        with suppress(psutil.NoSuchProcess):
            process.kill()


def lines(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def numbers(lines: list[dict]) -> list[dict]:
    return [{name: value for name, value in line.items() if not name.startswith(TIMINGS)} for line in lines]


def listeners(pid: int) -> list:
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return []
    return [connection for connection in connections if connection.status == psutil.CONN_LISTEN]


def leftovers(pid: int) -> list[str]:
    """What a run keeps in the places of segments and sockets, named after its process."""
    return [path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob(f"megarl-{pid}-*")]
