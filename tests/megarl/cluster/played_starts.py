"""Starts of an engine that end as a test says, with no process, and with a clock that is played."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.engines.restarts import Restarts, StartStages
from megarl.cluster.workers.worker import Call, WorkerFailed, WorkerGone

UP_WITHIN_S = 300.0


@dataclass(eq=False)
class Process:
    """As much of a worker as has to do with a start."""

    log: Path
    failure: WorkerFailed | None = None
    has_lost_its_machine: bool = False
    silence_s: float = 1e9

    def begin_node(self) -> None:
        """Nobody waits for it."""

    def die(self) -> WorkerFailed:
        self.failure = WorkerGone(f"the process of {self.log.stem} died", "see why", self.log)
        return self.failure


@dataclass
class Clock:
    """A time that passes when somebody sleeps."""

    now_s: float = 1000.0
    naps: int = 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.naps += 1


@dataclass
class Run:
    """An engine that died, and what becomes of its starts: the next `failing` fail, in one step of them."""

    log: Path
    clock: Clock
    max_restarts: int = 3
    failing: int = 0
    failing_step: str = "start"
    processes_die: bool = False
    """Whether they fail by the death of their processes."""
    has_weights: bool = True
    events: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = EngineHandle([Process(self.log)])  # type: ignore[list-item]
        self.engine.note_committed(1)
        stages = StartStages(self._prepare, self._load)
        self.restarts = Restarts(self.max_restarts, stages, up_within_s=UP_WITHIN_S, start_within_s=3600)
        self.restarts.note_started([self.engine])
        self.died_s = self.clock.now_s

    def times(self, step: str) -> list[float]:
        """When a step was begun, since the death."""
        return [time_s - self.died_s for time_s, begun in self.events if begun == step]

    def die(self) -> None:
        self.engine.worker.die()  # type: ignore[attr-defined]
        self.died_s = self.clock.now_s
        self.restarts.begin(self.engine)

    def come_back(self) -> None:
        """Wait for it, as the trainer does where nobody serves, while the router looks after dead engines, too."""
        while self.restarts.awaits(self.engine):
            self.restarts.wait()
            self.restarts.begin(self.engine)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.restarts.wait()

    def _prepare(self, handle: EngineHandle) -> Iterator[Sequence[Call[Any]]]:
        handle.renew([Process(self.log)])  # type: ignore[list-item]
        yield [self._call("end_others")]
        yield [self._call("make")]

    def _load(self, handle: EngineHandle) -> Iterator[Sequence[Call[Any]]]:
        yield [self._call("start")]
        handle.note_started(1 if self.has_weights else -1, [0])

    def _call(self, step: str) -> Call[Any]:
        self.events.append((self.clock.now_s, step))
        fails = step == self.failing_step and self.failing > 0
        self.failing -= fails
        return Call(self.engine.worker, Played(step, fails, self.processes_die))  # type: ignore[arg-type]


class Played(NamedTuple):
    """How a step of a start ends."""

    step: str
    fails: bool
    process_dies: bool


def wait(calls: Sequence[Call[Any]], *_: object, **__: object) -> None:
    for call in calls:
        step, fails, process_dies = call.reference
        if fails and process_dies:
            raise call.worker.die()  # type: ignore[attr-defined]
        if fails:
            call.worker.failure = WorkerFailed(f"ValueError: no memory to {step}", call.worker.log, ValueError())
            raise call.worker.failure
