"""The controller's view of one engine: its processes, state, version and load."""

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
"""An engine queues one extra sample per this many that it computes; requests not yet sent can still go elsewhere."""


class EngineHandle:
    """An engine in a process of its own; one that spans machines has one more process on each other machine.

    Example: an engine of two workers that samples 64 responses with the weights of step 12 has state "serving", version
    12, load 64 and worker_nodes ["node-a", "node-a"]. One that starts without weights is "starting" until its first
    update is committed; while "updating", requests wait. A dead one is "down", then "restarting" while new processes
    come up in the seats of the old ones, then "starting" again.
    """

    def __init__(self, processes: Sequence[Worker], max_concurrent_samples: int | None = None) -> None:
        """`max_concurrent_samples` is how many samples it computes at the same time, None if unknown."""
        most = max_concurrent_samples
        self._room = None if most is None else most + max(1, most // _AT_HAND)
        self._take(processes)
        self._state: EngineState = "starting"
        self.version = -1
        """The version of the served weights; -1 without weights."""
        self.is_asleep = False
        """Whether its memory is away; requests in flight were aborted."""
        self._load = 0
        self._idle_s, self._since_s = 0.0, time.monotonic()
        self.worker_nodes: list[str] = []
        """The machine of each worker, by Ray's node ID; known once it has started."""

    @property
    def name(self) -> str:
        """Its name, which is that of its log."""
        return self.worker.log.stem

    @property
    def load(self) -> int:
        """The number of its unfinished samples."""
        return self._load

    @load.setter
    def load(self, samples: int) -> None:
        self._note_time()
        self._load = samples

    @property
    def cache(self) -> Hashable:
        """Identifies the KV cache that new requests can use: a restart or new weights change it."""
        return self.worker, self.version

    def take_idle_s(self) -> float:
        """Return the seconds without anything to sample since the last call; the load must not change meanwhile."""
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
        """Whether it has as many samples as it computes at once, plus the extra ones that it queues."""
        return self._room is not None and self.load >= self._room

    @property
    def has_room(self) -> bool:
        """Whether it can take a request now."""
        return self.is_up and not self.is_asleep and not self.is_full

    @property
    def state(self) -> EngineState:
        """The present state; "down" as soon as a death is known, except while restarting, which `Restarts` handles."""
        return self._state if self.death is None or self._state == "restarting" else "down"

    @property
    def is_up(self) -> bool:
        """Whether it can be called."""
        return self.state not in ("restarting", "down")

    @property
    def death(self) -> WorkerFailed | None:
        """The failure that the engine died of; None if it is not known to be dead."""
        return next((each.failure for each in self.processes if each.failure and is_death(each.failure)), None)

    @property
    def has_lost_its_machine(self) -> bool:
        """Whether one of its machines is gone, as far as Ray knows, so that it cannot be restarted in its place."""
        return any(each.has_lost_its_machine for each in self.processes)

    @property
    def processes(self) -> list[Worker]:
        """The process that answers calls, and those on other machines."""
        return [self.worker, *self.parts]

    def make(self, kind: EngineKind, model_path: Path, arguments: Arguments) -> Iterator[Sequence[Call[Any]]]:
        """Create the engine in its processes; yields the calls of each step, which must end before the next step.

        Raises UserError if the processes cannot reach each other.
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
        """Begin to start it in all its processes; those on several machines wait for each other."""
        return [process.begin(Engine.start.__name__) for process in self.processes]

    def begin(self, method: Callable[[Engine, *Ts], R], *arguments: *Ts) -> Call[R]:
        """Begin a call of a method of `Engine`, such as `Engine.write`."""
        return self.worker.begin(method.__name__, *arguments)

    def stream(self, method: Callable[[Engine, *Ts], object], *arguments: *Ts) -> Stream:
        """Begin a call of a generator method of `Engine`."""
        return Stream.begin(self.worker, method.__name__, *arguments)

    def note_started(self, version: int, worker_parts: Sequence[int]) -> None:
        """Note that it is up, with weights of `version` and its workers in these processes."""
        nodes = wait([process.begin_node() for process in self.processes])
        self.worker_nodes = [nodes[part] for part in worker_parts]
        self._state, self.version = "serving" if version >= 0 else "starting", version

    def renew(self, processes: Sequence[Worker]) -> None:
        """Replace dead processes by new ones; `note_started` marks it as up again."""
        self._take(processes)
        self._state, self.version = "restarting", -1

    def _take(self, processes: Sequence[Worker]) -> None:
        self.worker, *self.parts = processes
        self.worker.needs = self.parts

    def begin_update(self, version: int, names: list[str]) -> Call[None]:
        """Begin to fence it for an update of the tensors `names`, which may be a Ray reference.

        From now on new requests go to serving engines, if there are any.
        """
        if self._state == "serving":
            self._state = "updating"
        return self.begin(Engine.begin_update, version, names)

    def note_committed(self, version: int) -> None:
        """Note that it serves `version`."""
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
    """Whether a call's failure means that the engine is dead."""
    return isinstance(failure, WorkerGone) or isinstance(failure.error, EngineDiedError)
