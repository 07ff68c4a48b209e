"""A run ends with a checkpoint when the time of its job is too short for another step."""

import time
from threading import Thread

import pytest

from megarl.process.job_time import JobTime
from megarl.process.signals import asked_to_stop, interruption


@pytest.fixture
def passing(monkeypatch):
    """Lets seconds pass."""
    clocks = {"time": 1e9, "monotonic": 50.0}
    for name in clocks:
        monkeypatch.setattr(time, name, lambda name=name: clocks[name])

    def let(seconds: float) -> None:
        for name in clocks:
            clocks[name] += seconds

    return let


def test_a_step_fits_as_long_as_the_longest_and_its_checkpoint_do(passing):
    job_time = JobTime(1e9 + 1000)
    for seconds, fits in ((100, True), (200, True), (50, True), (170, True), (180, False)):
        passing(seconds)
        job_time.end_step()
        # The longest takes 200 seconds: 250 with a checkpoint, and a minute for the end.
        assert job_time.fits_another() == fits, seconds


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
                if stop.end_step():
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
            said.append(stop.end_step())

    thread = Thread(target=run)
    thread.start()
    thread.join(30)
    assert said == [False]
