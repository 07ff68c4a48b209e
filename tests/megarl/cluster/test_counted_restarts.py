"""Restarts of engines are counted over the whole run, whatever it goes on from; no process has to start."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.engines import restarts as module
from megarl.cluster.engines.restarts import Restarts, StartStages
from megarl.cluster.workers.worker import Call, WorkerFailed, WorkerGone


@dataclass(eq=False)
class Engine:
    """As much of an engine as has to do with its death."""

    log: Path
    number: int
    state: str = "down"
    has_lost_its_machine: bool = False

    @property
    def name(self) -> str:
        return f"engine_{self.number}"

    @property
    def death(self) -> WorkerFailed:
        return WorkerGone(f"the process of {self.name} died", f"see why {self.number}", self.log)

    @property
    def worker(self) -> SimpleNamespace:
        return SimpleNamespace(log=self.log)


def steps(_: Engine) -> Iterator[Sequence[Call[Any]]]:
    return iter(())


def restarts(most: int, state: dict[str, Any] | None = None) -> Restarts:
    made = Restarts(most, StartStages(steps, steps), up_within_s=60, start_within_s=60)
    if state is not None:
        made.load_state_dict(json.loads(json.dumps(state)))
    return made


@pytest.fixture
def log(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("the last words of the first\n")
    return log


def test_a_run_counts_the_restarts_before_its_checkpoint_and_names_the_first_cause_of_all(log, capsys) -> None:
    before = restarts(3)
    for number in range(2):
        before.begin(Engine(log, number))
    log.write_text("others\n")
    after = restarts(3, before.state_dict())
    assert after.end_step()["engines/restarts"] == 2
    after.begin(Engine(log, 2))
    assert "engine_2 is started again (restart 3 of 3)" in capsys.readouterr().err
    with pytest.raises(WorkerGone) as caught:
        after.begin(Engine(log, 3))
    assert caught.value.sentence == (
        "engines died more often than cluster.max_engine_restarts=3 allows, the last time: the process of engine_3 "
        "died: the first time, the process of engine_0 died: see why 0"
    )
    assert caught.value.details.endswith("the last words of the first")
    assert not caught.value.may_resume


@pytest.mark.parametrize(("most", "is_over"), [(1, True), (2, True), (3, False)])
def test_more_restarts_than_before_are_allowed_by_the_configuration_alone(most, is_over, log) -> None:
    before = restarts(5)
    for number in range(2):
        before.begin(Engine(log, number))
    after = restarts(most, before.state_dict())
    if is_over:
        with pytest.raises(WorkerGone, match=f"max_engine_restarts={most} allows"):
            after.begin(Engine(log, 2))
    else:
        after.begin(Engine(log, 2))
        assert after.count == 3


def test_an_engine_that_is_gone_with_its_machine_is_not_started_where_it_was_and_the_run_may_resume(log) -> None:
    run = restarts(3)
    for number in range(8):
        with pytest.raises(
            WorkerGone, match=f"^engine_{number} is gone with the Ray node .*: see to the mach"
        ) as caught:
            run.begin(Engine(log, number, has_lost_its_machine=True))
        assert caught.value.may_resume
    assert run.state_dict() == {"count": 0, "first": None}


def test_a_start_ends_when_it_is_heard_that_the_machine_is_gone(log, monkeypatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", 0.0)
    # New processes wait for their place for ever.
    monkeypatch.setattr(module.ray, "wait", lambda references, **_: ([], references))
    call = SimpleNamespace(reference="a new process is up")
    run = Restarts(3, StartStages(lambda _: iter([[call]]), steps), up_within_s=60, start_within_s=60)
    engine = Engine(log, 1)
    run.begin(engine)
    run.advance()
    engine.has_lost_its_machine = True
    with pytest.raises(WorkerGone, match="engine_1 is gone with the Ray node") as caught:
        run.advance()
    assert (caught.value.may_resume, run.count) == (True, 1)


def test_a_run_without_deaths_has_no_first_cause(log) -> None:
    assert restarts(1, restarts(1).state_dict()).state_dict() == {"count": 0, "first": None}
