"""A whole run of the command: killed and resumed, stopped, interrupted, and what it leaves behind."""

import os
import signal
import subprocess
import time

import psutil
import pytest
from whole_runs import (
    CHECKPOINT,
    LAST_STEP,
    START_TIMEOUT_S,
    job,
    kill_tree,
    leftovers,
    lines,
    numbers,
    start,
    wait_for_line,
)

from megatron_ext.checkpoint.checkpoint_folder import complete_iterations


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_a_run_that_is_killed_stopped_and_interrupted_goes_on_to_the_same_numbers(tmp_path, spawned):
    command = job(tmp_path)
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
    _, errors = run.communicate(timeout=START_TIMEOUT_S)
    assert run.returncode == code
    assert "Traceback" not in errors
    assert "***" not in errors
    said = [line for line in errors.splitlines() if line.startswith("megarl:")]
    assert said[-1] == errors.splitlines()[-1] == "megarl: interrupted"
    assert [line.startswith("megarl: SIGTERM: this step is finished") for line in said[:-1]] == [True] * saves
    assert [pid for pid in family if psutil.pid_exists(pid)] == []
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listeners(pid: int) -> list:
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except psutil.NoSuchProcess:
        return []
    return [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
