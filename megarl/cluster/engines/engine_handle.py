"""One engine as the controller knows it: its process, state, weights and load."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, TypeVarTuple

from megarl.cluster.engines.reachability import meeting
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.streams import Stream
from megarl.cluster.workers.worker import Call, Worker, WorkerFailed, WorkerGone
from megarl.rollout.kind import Arguments, EngineKind
from megarl.rollout.protocol import Engine, EngineDiedError

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
EngineState: TypeAlias = Literal["starting", "serving", "updating", "restarting", "down"]

_AT_HAND = 4
"""One sample waits in an engine for so many that it computes: what it has not been asked for can go elsewhere."""


class EngineHandle:
    """An engine in a process of its own; one over machines has a further process on each of the other machines.

    Example: an engine of two workers that samples 64 responses with the weights of step 12 has state "serving",
    version 12, load 64 and worker_nodes ["node-a", "node-a"]. One that starts without weights is "starting" until its
    first update is committed; one that is "updating" lets requests wait. One that has died is "down", and "restarting"
    from when new processes take the seats of the old ones until they are up; then it is "starting" again.
    """

    def __init__(self, processes: Sequence[Worker], max_concurrent_samples: int | None = None) -> None:
        """`max_concurrent_samples` is how many samples it computes at the same time, where that is known."""
        most = max_concurrent_samples
        self._room = None if most is None else most + max(1, most // _AT_HAND)
        self._take(processes)
        self._state: EngineState = "starting"
        self.version = -1
        """The version of the weights that it serves; -1 are none."""
        self.is_asleep = False
        """Whether its memory is away; what was in flight was cut."""
        self._load = 0
        self._idle_s, self._since_s = 0.0, time.monotonic()
        self.worker_nodes: list[str] = []
        """The machine that each of its workers is on, as Ray names it; known once it has started."""

    @property
    def name(self) -> str:
        """As its log is called."""
        return self.worker.log.stem

    @property
    def load(self) -> int:
        """How many samples it has that have not ended."""
        return self._load

    @load.setter
    def load(self, samples: int) -> None:
        self._note_time()
        self._load = samples

    @property
    def cache(self) -> Hashable:
        """Names the keys and values that new requests meet in it: others after a restart, and with other weights."""
        return self.worker, self.version

    def take_idle_s(self) -> float:
        """Seconds without anything to sample, since they were taken last; the load may not change meanwhile."""
        self._note_time()
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def _note_time(self) -> None:
        now_s = time.monotonic()
        if self._load == 0:
            self._idle_s += now_s - self._since_s
        self._since_s = now_s

    @property
    def is_full(self) -> bool:
        """Whether it has as many samples as it computes at once, and the next ones at hand."""
        return self._room is not None and self.load >= self._room

    @property
    def has_room(self) -> bool:
        """Whether something can be asked of it now."""
        return self.is_up and not self.is_asleep and not self.is_full

    @property
    def state(self) -> EngineState:
        """The present state; "down" as soon as a death is known, but of one that is restarting `Restarts` hears."""
        return self._state if self.death is None or self._state == "restarting" else "down"

    @property
    def is_up(self) -> bool:
        """Whether it can be asked for anything."""
        return self.state not in ("restarting", "down")

    @property
    def death(self) -> WorkerFailed | None:
        """The failure that the engine died of; None if no death was noticed."""
        return next((each.failure for each in self.processes if each.failure and is_death(each.failure)), None)

    @property
    def has_lost_its_machine(self) -> bool:
        """Whether a machine that it is on is gone, as far as Ray knows: it cannot be started again in its place."""
        return any(each.has_lost_its_machine for each in self.processes)

    @property
    def processes(self) -> list[Worker]:
        """The one that answers, and those on other machines."""
        return [self.worker, *self.parts]

    def make(self, kind: EngineKind, model_path: Path, arguments: Arguments) -> Iterator[Sequence[Call[Any]]]:
        """Make the engine in its processes: yields the calls of each step, which have to end before the next one.

        Raises UserError where the processes do not see each other.
        """
        if not self.parts:
            yield [self.worker.begin_make(*kind.engine_class, model_path, arguments)]
            return
        assert kind.part_class is not None, f"{kind.title} spans one machine"
        yield from meeting(self.processes)
        yield [looking := self.worker.begin_free_address()]
        (first,) = wait([looking])
        made = [kind.engine_class, *[kind.part_class] * len(self.parts)]
        yield [
            process.begin_make(*own, model_path, {**arguments, **kind.part_arguments(number, first)})
            for number, (process, own) in enumerate(zip(self.processes, made, strict=True))
        ]

    def begin_start(self) -> list[Call[None]]:
        """Begin to start it in all its processes: those of an engine over machines wait for each other."""
        return [process.begin(Engine.start.__name__) for process in self.processes]

    def begin(self, method: Callable[[Engine, *Ts], R], *arguments: *Ts) -> Call[R]:
        """Begin a call of a method of `Engine`, such as `Engine.write`."""
        return self.worker.begin(method.__name__, *arguments)

    def stream(self, method: Callable[[Engine, *Ts], object], *arguments: *Ts) -> Stream:
        """Begin a call of a generator method of `Engine`."""
        return Stream.begin(self.worker, method.__name__, *arguments)

    def note_started(self, version: int, worker_parts: Sequence[int]) -> None:
        """Note that it is up, with the weights of this version and its workers in these processes."""
        nodes = wait([process.begin_node() for process in self.processes])
        self.worker_nodes = [nodes[part] for part in worker_parts]
        self._state, self.version = "serving" if version >= 0 else "starting", version

    def renew(self, processes: Sequence[Worker]) -> None:
        """Go on with new processes in place of those that died; `note_started` says that it is up again."""
        self._take(processes)
        self._state, self.version = "restarting", -1

    def _take(self, processes: Sequence[Worker]) -> None:
        self.worker, *self.parts = processes
        self.worker.needs = self.parts

    def begin_update(self, version: int, names: list[str]) -> Call[None]:
        """Begin to fence it, for tensors of these `names` or of those behind a reference.

        From here on new requests go to engines that serve, if there are any.
        """
        if self._state == "serving":
            self._state = "updating"
        return self.begin(Engine.begin_update, version, names)

    def note_committed(self, version: int) -> None:
        """Note that it serves the weights of this version."""
        self._state, self.version = "serving", version


def wait_for_living(calls: Sequence[Call[Any]]) -> None:
    """Wait for calls of engines; ignore the calls of an engine that dies. Raises any other failure."""
    for call in calls:
        try:
            wait([call])
        except WorkerFailed as failure:
            if not is_death(failure):
                raise


def is_death(failure: WorkerFailed) -> bool:
    """Whether nothing more can be asked of an engine of which a call has failed so."""
    return isinstance(failure, WorkerGone) or isinstance(failure.error, EngineDiedError)
