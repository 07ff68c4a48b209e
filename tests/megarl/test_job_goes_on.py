"""A whole run of the command that goes on by itself after processes of it were killed."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from whole_runs import (
    CHECKPOINT,
    LAST_STEP,
    START_TIMEOUT_S,
    job,
    leftovers,
    lines,
    numbers,
    start,
    wait_for_line,
    wait_until,
)

from megatron_ext.checkpoint.checkpoint_folder import complete_iterations


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_of_which_processes_are_killed_goes_on_by_itself_to_the_same_numbers(tmp_path, spawned):
    command = job(tmp_path)
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
    assert "the process of critic_0 died; the run has no checkpoint and starts over (restart 1 of 10)" in errors
    assert f"died; the run goes on from the checkpoint of step {CHECKPOINT} (restart 2 of 10)" in errors
    assert leftovers(run.pid) == []
    start([*command(undisturbed), f"loop.steps={LAST_STEP + 1}"], spawned).communicate(timeout=START_TIMEOUT_S)
    assert len(lines(output)) == LAST_STEP + 2
    assert numbers(lines(output)) == numbers(lines(undisturbed))
    weights = "huggingface/model.safetensors"
    assert (output / weights).read_bytes() == (undisturbed / weights).read_bytes()


def writer_of(log: Path, run: subprocess.Popen) -> psutil.Process:
    """The process of a run that writes to a log and has no parent that does."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with suppress(FileNotFoundError):  # it ends
            if os.readlink(f"/proc/{process.pid}/fd/1") == str(log):
                found.append(process)
    (writer,) = found
    return writer
