"""A run ends with a checkpoint when the time of its job is too short for another step."""

import time
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from megarl.process.job_time import JobTime
from megarl.process.signals import asked_to_stop, interruption
from megarl.run.checkpoints import Checkpoints, latest_checkpoint
from megarl.run.steps import run_steps
from megarl.schema import CheckpointConfig, MegarlConfig
from megarl.tracking.clock import Clock


@pytest.fixture
def passing(monkeypatch):
    """Lets seconds pass."""
    clocks = {"time": 1e9, "monotonic": 50.0, "perf_counter": 0.0}
    for name in clocks:
        monkeypatch.setattr(time, name, lambda name=name: clocks[name])

    def let(seconds: float) -> None:
        for name in clocks:
            clocks[name] += seconds

    return let


def test_a_step_fits_as_long_as_the_longest_and_its_checkpoint_do(passing):
    job_time = JobTime(1e9 + 1000)
    for seconds, fits in ((100, True), (200, True), (50, True), (170, True), (180, False)):
        job_time.begin_step()
        passing(seconds)
        job_time.end_step()
        # The longest takes 200 seconds: 250 with a quarter for a checkpoint, and a minute for the end.
        assert job_time.fits_another() == fits, seconds


class SlowDisk:
    """Ranks that write checkpoints, beside what else they do, one after the other."""

    def __init__(self, passing, seconds: float) -> None:
        self.passing, self.seconds = passing, seconds
        self.is_done_at = 0.0

    def begin_save(self, folder, *, in_background):
        assert time.time() >= self.is_done_at
        self.is_done_at = time.time() + self.seconds

    def save_is_written(self) -> bool:
        return time.time() >= self.is_done_at

    def finish_save(self) -> float:
        self.passing(max(0.0, self.is_done_at - time.time()))
        return self.seconds


def steps_of_a_job(passing, config: CheckpointConfig, folder: Path, *, step_s: float, save_s: float) -> int:
    """Let a run train until its job's time is too short: after which step is the last checkpoint."""
    made = MegarlConfig(output_dir=str(folder), checkpoint=config)

    def take_step() -> dict[str, float]:
        passing(step_s)
        run.step += 1
        return {}

    checkpoints = Checkpoints(made, "train", {"": SlowDisk(passing, save_s)})
    run = SimpleNamespace(
        setup=SimpleNamespace(config=made),
        timeline=SimpleNamespace(record=nullcontext),
        checkpoints=checkpoints,
        step=0,
        is_over=False,
        log=lambda _metrics: None,
    )
    with pytest.raises(KeyboardInterrupt), interruption(), checkpoints:
        run_steps(run, Clock(), take_step=take_step, save=lambda: checkpoints.save(run.step, lambda _write: {}))
    assert latest_checkpoint(made, "train").step == run.step
    return run.step


@pytest.mark.parametrize(
    ("async_save", "every", "step_s", "save_s", "done"),
    [
        # Every save waits for the one before, so a step takes 900.
        (True, 1, 300, 900, 10),
        (True, 1, 900, 300, 10),
        (True, 5, 300, 900, 29),
        # One that is being written when no further step fits goes first.
        (True, 10, 300, 2500, 20),
        (False, 1, 300, 900, 8),
        (False, 5, 300, 900, 20),
    ],
)
def test_a_runs_last_checkpoint_is_complete_before_its_job_ends(
    passing, monkeypatch, tmp_path, async_save, every, step_s, save_s, done
):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(10**9 + 10_000))
    config = CheckpointConfig(every=every, async_save=async_save, on_signal=True)
    assert steps_of_a_job(passing, config, tmp_path, step_s=step_s, save_s=save_s) == done
    assert time.time() < 1e9 + 10_000


def test_a_run_that_cannot_know_how_long_a_checkpoint_takes_says_so(passing, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(10**9 + 1000))
    config = CheckpointConfig(every=0, on_signal=True)
    assert steps_of_a_job(passing, config, tmp_path, step_s=300, save_s=50) == 2
    assert "with checkpoint.every=0 the first checkpoint is that at the end" in capfd.readouterr().err


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_END_TIME": ""}, {"SLURM_JOB_END_TIME": "NONE"}])
def test_a_job_without_a_limit_has_time(passing, environment):
    job_time = JobTime.of(environment)
    passing(1e8)
    job_time.end_step()
    assert job_time.fits_another()


@pytest.mark.parametrize(("waits", "done"), [(True, 2), (False, 5)])
def test_a_run_ends_as_if_told_to_after_the_last_step_that_fits(passing, monkeypatch, capfd, waits, done):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(10**9 + 1000))
    steps = []

    def run() -> None:
        with asked_to_stop(waits=waits) as stop:
            for step in range(5):
                passing(400)
                steps.append(step)
                stop.end_step()
                if stop.stops_before_next_step():
                    break

    with interruption() as ending:
        if waits:
            with pytest.raises(KeyboardInterrupt):
                run()
            assert ending.exit_code == 143
            assert "the job's time is too short for another step" in capfd.readouterr().err
        else:
            run()
    assert len(steps) == done


def test_a_run_in_another_thread_does_not_end_where_nothing_tells_its_program(passing, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(10**9))
    said = []

    def run() -> None:
        with asked_to_stop(waits=True) as stop:
            passing(400)
            stop.end_step()
            said.append(stop.stops_before_next_step())

    thread = Thread(target=run)
    thread.start()
    thread.join(30)
    assert said == [False]
