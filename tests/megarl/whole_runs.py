"""Whole runs of the command as processes of their own: started, watched and killed."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
from equal_runs import without_timings

from megarl.quickstart.arithmetic import write_arithmetic
from megarl.quickstart.tiny_models import write_tiny_model

T = TypeVar("T")
CHECKPOINT, LAST_STEP = 3, 5
START_TIMEOUT_S = 600


def job(folder: Path) -> Callable[[Path], list[str]]:
    """The command of a run that has much state, by the folder of its output; model and data are in `folder`."""
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


def wait_until(told: Callable[[], T], run: subprocess.Popen) -> T:
    """The first answer of `told` that is anything."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (answer := told()):
        assert run.poll() is None, run.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


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
    return [without_timings(line) for line in lines]


def leftovers(pid: int) -> list[str]:
    """Names that a run keeps in the places of segments and sockets, named after its process."""
    return [
        path.name for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob(f"megarl-{pid}-*")
    ]
