"""Engines that died and do not come back at once are tried again; no process has to start, and the clock is played."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from played_starts import UP_WITHIN_S, Clock, Process, Run, wait

from megarl.cluster.engines import restarts as module
from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.engines import Engines, SharedByEngines
from megarl.cluster.workers.worker import WorkerFailed, WorkerGone
from megarl.resharding.direct.connections import TransferError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "wait", wait)
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=lambda references, **_: (references, [])))
    monkeypatch.setattr("megarl.cluster.engines.engine_handle.wait", lambda calls: calls)
    return clock


@pytest.fixture
def log(tmp_path: Path) -> Path:
    log = tmp_path / "engine_3.log"
    log.write_text("the last words\n")
    return log


def test_a_start_that_fails_is_made_again_after_growing_waits_and_is_no_further_restart(log, clock, capsys) -> None:
    run = Run(log, clock, failing=3)
    run.die()
    run.come_back()
    assert run.engine.state == "serving"
    # Everything that a failed try has left is ended at once, and then there is a wait.
    assert run.times("end_others") == [0, 0, 10, 40]
    assert run.times("start") == [0, 10, 40, 100]
    metrics = run.restarts.end_step()
    assert metrics == {
        "engines/restarts": 1,
        "engines/failed_starts": 3,
        "engines/down": 0,
        "engines/seconds_down": 100,
    }
    assert run.restarts.end_step() == {"engines/restarts": 1, "engines/failed_starts": 0, "engines/down": 0}
    said = capsys.readouterr().err
    assert (
        "engine_3 did not come back (ValueError: no memory to start); it is started once more in 30 s (try 3 of 8), "
        "and requests wait for it\n" in said
    )
    # One look in a second, no more.
    assert clock.naps == 100


def test_waits_begin_anew_with_each_death(log, clock) -> None:
    run = Run(log, clock)
    for death in range(3):
        run.failing = 2
        run.events.clear()
        run.die()
        run.come_back()
        assert run.times("start") == [0, 10, 40]
        assert run.restarts.end_step()["engines/restarts"] == death + 1


@pytest.mark.parametrize("deaths_before", [0, 2])
def test_an_engine_that_never_comes_back_is_a_failure_from_which_the_run_goes_on(log, clock, deaths_before) -> None:
    run = Run(log, clock)
    for _ in range(deaths_before):
        run.die()
        run.come_back()
    run.failing = 100
    run.events.clear()
    run.die()
    with pytest.raises(WorkerGone) as caught:
        run.come_back()
    assert run.times("start") == [0, 10, 40, 100, 220, 520, 1120, 1720]
    assert caught.value.sentence == (
        "engine_3 did not come back in 8 tries within 1720 s, the last time: ValueError: no memory to start: see to "
        "its machine and the end of its log; the same command continues from the last checkpoint"
    )
    assert caught.value.may_resume
    assert caught.value.details.endswith("the last words")
    # Whoever else waits for it is told the same.
    with pytest.raises(WorkerGone, match=r"^engine_3 did not come back in 8 tries"):
        run.restarts.advance()


def test_starts_that_hang_are_not_made_again_all_day(log, clock, monkeypatch) -> None:
    run = Run(log, clock)
    monkeypatch.setattr(module.ray, "wait", lambda references, **_: _hang_in_start(clock, references))
    run.die()
    with pytest.raises(WorkerGone, match=r"^engine_3 did not come back in 2 tries within 72\d\d s"):
        run.come_back()
    assert len(run.times("start")) == 2


def _hang_in_start(clock, references):
    if references[0].step != "start":
        return references, []
    clock.sleep(1.0)
    return [], references


def test_one_that_fails_before_it_is_up_waits_first_and_is_not_late_for_that(log, clock) -> None:
    run = Run(log, clock, failing=5, failing_step="end_others")
    run.die()
    run.come_back()
    # The waits are longer than a process may take to come up.
    assert run.times("end_others") == [0, 10, 40, 100, 220, 520]
    assert run.times("start") == [520]
    assert run.engine.state == "serving"


def test_a_try_that_begins_late_has_its_whole_time(log, clock, monkeypatch) -> None:
    run = Run(log, clock, failing=1, failing_step="end_others")
    run.die()
    run.restarts.advance()
    # Nobody goes on with restarts, as in a long refit.
    clock.sleep(2 * UP_WITHIN_S)
    slow = iter([([], [0]), *[([0], [])] * 9])
    monkeypatch.setattr(module.ray, "wait", lambda references, **_: _slowly(next(slow), references))
    run.come_back()
    assert (run.engine.state, run.restarts.end_step()["engines/failed_starts"]) == ("serving", 1)


def _slowly(ended, references):
    return (references, []) if ended[0] else ([], references)


def test_a_process_that_does_not_come_up_is_late_once_its_wait_is_over(log, clock, monkeypatch, capsys) -> None:
    run = Run(log, clock)
    monkeypatch.setattr(module.ray, "wait", lambda references, **_: (clock.sleep(1.0), ([], references))[1])
    run.die()
    run.until(lambda: len(run.times("end_others")) == 3)
    assert run.times("end_others") == pytest.approx([0, 311, 642], abs=5)
    assert capsys.readouterr().err.count("(the new process of engine_3 was not up after 300 s); it is started") == 2


def test_the_trainer_does_not_wait_for_a_start_that_waits(log, clock) -> None:
    run = Run(log, clock, failing=2)
    run.die()
    run.until(lambda: run.failing == 0)
    before_s = clock.now_s
    run.restarts.pause()
    # All that the failed try had is ended.
    assert clock.now_s == before_s
    assert len(run.times("end_others")) == 3
    clock.now_s += 100
    run.restarts.advance()
    # It takes no memory before its turn.
    assert (len(run.times("make")), len(run.times("start"))) == (3, 2)
    run.restarts.resume()
    run.come_back()
    assert len(run.times("start")) == 3


def test_the_trainer_waits_until_a_failed_try_has_left_nothing(log, clock) -> None:
    run = Run(log, clock, failing=2, failing_step="end_others")
    run.die()
    run.restarts.pause()
    assert run.times("end_others") == [0, 10, 40]
    assert clock.now_s - run.died_s == 40


@pytest.mark.parametrize("failing_step", ["end_others", "start"])
def test_an_engine_that_waits_for_its_start_is_not_dead_once_more(log, clock, failing_step) -> None:
    run = Run(log, clock, failing=1, failing_step=failing_step)
    run.die()
    run.until(lambda: run.failing == 0)
    begun = len(run.events)
    # The process of the failed try, or of the next one.
    run.engine.worker.die()
    for _ in range(3):
        assert run.engine.state == "restarting"
        assert not run.engine.is_up
        run.restarts.begin(run.engine)
    run.restarts.advance()
    assert (len(run.events), run.restarts.end_step()["engines/failed_starts"]) == (begun, 1)


@pytest.mark.parametrize("failing_step", ["end_others", "make", "start"])
def test_processes_that_die_in_a_start_are_failed_starts_one_by_one(log, clock, failing_step) -> None:
    run = Run(log, clock, failing=2, failing_step=failing_step, processes_die=True)
    run.die()
    run.come_back()
    assert run.times("start")[-1] == 40
    metrics = run.restarts.end_step()
    assert (metrics["engines/restarts"], metrics["engines/failed_starts"]) == (1, 2)


def test_an_engine_whose_machine_is_lost_while_it_waits_is_given_up_at_once(log, clock, monkeypatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", 0.0)
    run = Run(log, clock, failing=3)
    run.die()
    run.until(lambda: run.failing == 0)
    run.restarts.wait()
    run.engine.worker.has_lost_its_machine = True
    before_s = clock.now_s
    with pytest.raises(WorkerGone, match=r"^engine_3 is gone with the Ray node that it was on") as caught:
        run.restarts.wait()
    assert caught.value.may_resume
    assert clock.now_s - before_s < 2


def test_before_all_engines_have_started_each_failed_start_is_a_restart(log, clock, capsys) -> None:
    run = Run(log, clock, failing=3)
    run.restarts.note_started([])
    with pytest.raises(WorkerGone, match=r"^engines died more often than cluster\.max_engine_restarts=3") as caught:
        run.die()
    assert not caught.value.may_resume
    assert run.times("start") == [0, 0, 0]
    assert "(restart 3 of 3)" in capsys.readouterr().err


@pytest.mark.parametrize("lives", [True, False])
def test_an_engine_that_is_up_and_fails_as_it_gets_its_weights_is_started_anew(log, clock, capsys, lives) -> None:
    run = Run(log, clock, has_weights=False)
    run.die()
    run.until(lambda: run.engine.state == "starting")
    assert run.restarts.end_step()["engines/down"] == 1
    failure = WorkerFailed("OutOfMemoryError: of its GPU", log, MemoryError()) if lives else run.engine.worker.die()
    run.engine.worker.failure = failure
    assert not run.restarts.retry(WorkerFailed("another's", log))
    if lives:
        # It is no death.
        run.restarts.begin(run.engine)
        assert run.engine.state == "starting"
        assert run.restarts.retry(failure)
    else:
        run.restarts.begin(run.engine)
    assert not run.restarts.retry(failure)
    assert run.engine.state == "restarting"
    run.until(lambda: run.engine.state == "starting")
    assert run.times("start") == pytest.approx([0, 10], abs=2)
    run.engine.note_committed(7)
    run.restarts.note_serving(run.engine)
    metrics = run.restarts.end_step()
    assert (metrics["engines/restarts"], metrics["engines/failed_starts"], metrics["engines/down"]) == (1, 1, 0)
    assert (
        f"engine_3 did not come back ({failure.happened}); it is started once more in 10 s" in capsys.readouterr().err
    )


def test_one_whose_first_transfer_fails_is_started_anew_whoever_is_heard_first(log, clock) -> None:
    run = Run(log, clock, has_weights=False)
    run.die()
    run.until(lambda: run.engine.state == "starting")
    of_a_rank = WorkerFailed("engine worker 3 failed: no memory for a bucket", log, TransferError())
    assert not run.restarts.retry(of_a_rank)
    run.engine.worker.failure = WorkerFailed("no memory for a bucket", log, TransferError())
    assert not run.restarts.retry(WorkerFailed("a rank has no memory", log, MemoryError()))
    assert run.restarts.retry(of_a_rank)
    assert run.engine.state == "restarting"


@pytest.mark.parametrize("has_weights", [True, False])
def test_one_that_fails_in_its_turn_before_it_has_weights_is_started_anew(log, clock, monkeypatch, has_weights) -> None:
    run = Run(log, clock, has_weights=has_weights)
    run.die()
    run.until(lambda: run.engine.is_up)
    run.failing, run.failing_step = 1, "wake_up"
    monkeypatch.setattr(Process, "begin", lambda _, method, *__: run._call(method), raising=False)
    monkeypatch.setattr("megarl.cluster.engines.engines.wait", wait)
    engines = Engines([run.engine], SharedByEngines(run.restarts, SimpleNamespace(queue=None)))  # type: ignore[arg-type]
    if has_weights:
        with pytest.raises(WorkerFailed, match="no memory to wake_up"):
            engines.wake_up({"weights"})
    else:
        engines.wake_up({"weights"})
    assert run.engine.state == ("serving" if has_weights else "restarting")
    assert run.restarts.end_step()["engines/failed_starts"] == (0 if has_weights else 1)


@pytest.mark.parametrize(
    ("other_is", "said"),
    [
        ("serving", "the others go on"),
        ("updated", "the others go on"),
        ("starting", "requests wait for it"),
        ("dead", "requests wait for it"),
    ],
)
def test_it_is_said_whether_requests_wait(log, clock, capsys, other_is, said) -> None:
    run = Run(log, clock, failing=1)
    other = EngineHandle([Process(log)])
    if other_is != "starting":
        other.note_committed(1)
    if other_is == "dead":
        other.worker.die()
    if other_is == "updated":
        other.worker.begin = lambda *_: None
        other.begin_update(2, [])
    run.restarts.note_started([run.engine, other])
    run.die()
    run.come_back()
    assert f"(try 2 of 8), and {said}\n" in capsys.readouterr().err
