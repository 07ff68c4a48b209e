"""Whole runs of the command: killed and resumed, interrupted, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.checkpoint_folder import complete_iterations

T = TypeVar("T")
CHECKPOINT, LAST_STEP = 3, 5
# Metrics that may differ between two runs of the same numbers.
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
            # It starts sooner than vLLM, of which `test_two_machines.py` has a run that is killed.
            "rollout.engine=transformers",
            "loop.steps=1000",
            "loop.prompts_per_step=8",
            "loop.samples_per_prompt=4",
            "loop.eval_every=2",
            *(f"checkpoint.every={CHECKPOINT}", "checkpoint.async_save=true"),
            # Several updates, a critic, a reference that is not the model's folder any more and a coefficient that
            # adapts: there is more state to get wrong. The reward is one that an untrained model gets at times.
            f"reward.function={Path(__file__).with_name('digits.py')}:begins_with_a_digit",
            "algorithm.updates_per_step=2",
            "algorithm.router_replay=rollout",
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


@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_run_that_is_killed_stopped_and_interrupted_goes_on_to_the_same_numbers(command, tmp_path, spawned):
    output = tmp_path / "run"
    killed = start(command(output), spawned)
    wait_for_line(output, killed, LAST_STEP)
    assert leftovers(killed.pid)
    # The next step is under way; the last two of the steps that are done are lost.
    kill_tree(killed.pid)
    killed.wait()
    assert complete_iterations(output / "checkpoints") == [CHECKPOINT]
    (output / "checkpoints" / "iter_0000004.partial").mkdir()
    (output / "checkpoints" / "iter_0000004.partial" / "common.pt").write_bytes(b"half a file")
    uninterrupted = lines(output)

    # However many steps it takes until the signal acts, no other checkpoint is due.
    stopped = start([*command(output), "checkpoint.on_signal=true", "checkpoint.every=1000"], spawned)
    wait_for_line(output, stopped, CHECKPOINT + 1, earlier=uninterrupted)
    check_that_it_ends_cleanly(stopped, [signal.SIGTERM], 143, saves=True)
    # The step in which it came is saved, whatever is due.
    last = lines(output)[-1]["step"]
    assert complete_iterations(output / "checkpoints") == [CHECKPOINT, last]
    assert last > CHECKPOINT

    # As in the background of a script, where the shell has SIGINT ignored.
    interrupted = start(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command(output)], spawned)
    wait_for_line(output, interrupted, max(LAST_STEP, last + 1))
    check_that_it_ends_cleanly(interrupted, [signal.SIGINT, signal.SIGINT], 130)
    # The next run removes what a killed one cannot.
    assert [leftovers(run.pid) for run in (killed, stopped, interrupted)] == [[], [], []]
    again = lines(output)[: len(uninterrupted)]
    assert len(again) == LAST_STEP + 1
    assert again[CHECKPOINT + 1] != uninterrupted[CHECKPOINT + 1], "steps after the checkpoint are done again"
    assert numbers(again) == numbers(uninterrupted)
    assert len({line["policy/kl_coefficient"] for line in again[1:]}) == LAST_STEP
    assert any(line["reward/std"] > 0 for line in again[CHECKPOINT + 1 :])
    # In float32 engine and trainer choose the same experts; the second of two updates has other weights.
    assert max(line["experts/changed_by_replay"] for line in again[1:]) < 0.1
    assert max(line["log_prob_difference/max"] for line in again[1:]) < 1e-3
    assert max(line["experts/gap_replayed"] for line in again[1:]) < 1e-5


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_of_which_processes_are_killed_goes_on_by_itself_to_the_same_numbers(command, tmp_path, spawned):
    output, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    run = start([*command(output), f"loop.steps={LAST_STEP + 1}"], spawned)
    kept = output / "metrics.1.jsonl"
    wait_for_line(output, run, 1)
    segments = len(leftovers(run.pid))
    # A rank of the critic before there is a checkpoint, one of the policy after it.
    writer_of(output / "logs/critic_0.log", run).kill()
    first = wait_until(lambda: kept.exists() and lines(output), run)
    assert first[0]["step"] == 0
    wait_until(lambda: complete_iterations(output / "checkpoints"), run)
    assert len(leftovers(run.pid)) == segments
    writer_of(output / "logs/trainer_1.log", run).kill()
    _, errors = run.communicate(timeout=START_TIMEOUT_S)
    assert run.returncode == 0, errors
    assert "the process of critic_0 died; the run has no checkpoint and begins anew (restart 1 of 10)" in errors
    assert f"died; the run goes on from the checkpoint of step {CHECKPOINT} (restart 2 of 10)" in errors
    assert leftovers(run.pid) == []
    start([*command(undisturbed), f"loop.steps={LAST_STEP + 1}"], spawned).communicate(timeout=START_TIMEOUT_S)
    assert len(lines(output)) == LAST_STEP + 2
    assert numbers(lines(output)) == numbers(lines(undisturbed))
    weights = "huggingface/model.safetensors"
    assert (output / weights).read_bytes() == (undisturbed / weights).read_bytes()


def writer_of(log: Path, run: subprocess.Popen) -> psutil.Process:
    """The process of a run that writes to a log and has no parent that does."""
    (found,) = (
        process
        for process in psutil.Process(run.pid).children(recursive=True)
        if os.readlink(f"/proc/{process.pid}/fd/1") == str(log)
    )
    return found


def wait_until(told: Callable[[], T], run: subprocess.Popen) -> T:
    """The first answer of `told` that is anything."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (answer := told()):
        assert run.poll() is None, run.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def check_that_it_ends_cleanly(
    run: subprocess.Popen, signals: list[signal.Signals], code: int, *, saves: bool = False
) -> None:
    """After `signals`, the first of which goes to all of its session unless it `saves`, as only the controller can."""
    family = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
    listening = {connection.laddr.ip for pid in family for connection in listeners(pid)}
    first, *others = signals
    (os.kill if saves else os.killpg)(run.pid, first)
    for number in others:
        time.sleep(0.15)
        os.kill(run.pid, number)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == code
    assert "Traceback" not in errors
    assert "***" not in errors
    said = [line for line in errors.splitlines() if line.startswith("megarl:")]
    assert said[-1] == errors.splitlines()[-1] == "megarl: interrupted"
    assert [line.startswith("megarl: SIGTERM: this step is finished") for line in said[:-1]] == [True] * saves
    assert [pid for pid in family if psutil.pid_exists(pid)] == []
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def start(arguments: list[str], spawned: list[subprocess.Popen]) -> subprocess.Popen:
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    spawned.append(process)
    return process


def wait_for_line(output: Path, run: subprocess.Popen, step: int, earlier: Sequence[dict] = ()) -> None:
    """Return when the metrics of `step` are written, other than those of an `earlier` run."""
    metrics = output / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and any(line["step"] == step and line not in earlier for line in lines(output)), run
    )


def kill_tree(pid: int) -> None:
    if not psutil.pid_exists(pid):
        return
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it may end with its parent
            process.kill()


def lines(output: Path) -> list[dict]:
    whole = (line for line in (output / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n"))
    return [json.loads(line) for line in whole]


def numbers(lines: list[dict]) -> list[dict]:
    return [{name: value for name, value in line.items() if not name.startswith(TIMINGS)} for line in lines]


def listeners(pid: int) -> list:
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return []
    return [connection for connection in connections if connection.status == psutil.CONN_LISTEN]


def leftovers(pid: int) -> list[str]:
    """Names that a run keeps in the places of segments and sockets, named after its process."""
    return [
        path.name for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob(f"megarl-{pid}-*")
    ]
