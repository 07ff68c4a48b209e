"""A worker process, its calls, and their failures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import ray

from megarl.cluster.placement.reservation import Seats
from megarl.cluster.workers.worker_actor import SocketAddress, WorkerActor
from megarl.process.errors import Resumable, RunFailed
from megarl.process.logs import last_lines

R = TypeVar("R", covariant=True)

_SIGNS = "signs"
"""Ray's concurrency group of the threads that answer heartbeats, whatever else the worker does."""
GOES_ON = "the same command continues from the last checkpoint"


class WorkerFailed(Resumable, RuntimeError):  # noqa: N818 - says what happened
    """A call failed in a worker, for a `reason`; `details` is the end of its log, `error` what was raised there."""

    def __init__(self, reason: str, log: Path, error: BaseException | None = None) -> None:
        self.reason, self.error, self.log = reason, error, log
        self.happened = reason
        self.details = f"The end of {log}:\n{last_lines(log)}"
        super().__init__(f"{reason}\n{self.details}")


class WorkerGone(WorkerFailed, RunFailed):
    """A worker's process is dead or does not answer: what `happened`, and what to do."""

    def __init__(self, happened: str, advice: str, log: Path) -> None:
        super().__init__(f"{happened}: {advice}", log)
        self.happened, self.sentence = happened, self.reason


class Worker:
    """Worker process number `number` of a role. `failure` is its latest known failure, if any."""

    def __init__(self, seats: Seats, number: int, *, logs: Path, calls_at_once: int = 1) -> None:
        role = seats.role
        self.log = logs / f"{role.name}_{number}.log"
        self._node = seats.nodes[number].id
        self.silence_s = seats.silence_s
        """How long it may be silent."""
        self.failure: WorkerFailed | None = None
        self.needs: Sequence[Worker] = ()
        """Workers without which none of its calls can end."""
        shared = seats.shared_gpus
        gpus = 0 if shared else role.gpus
        threads = {"max_concurrency": calls_at_once, "concurrency_groups": {_SIGNS: 1}}
        actor = ray.remote(num_cpus=role.cpus, num_gpus=gpus, **threads)(WorkerActor)
        self.actor = actor.options(
            runtime_env={"env_vars": dict(role.environment)}, scheduling_strategy=seats.strategy(number)
        ).remote(self.log, shared[number] if shared else None)

    @property
    def has_lost_its_machine(self) -> bool:
        """Whether Ray knows that the machine of its seat is gone, so that no process can come up there."""
        return self._node in {node["NodeID"] for node in ray.nodes() if not node["Alive"]}

    def begin_adopt(self, actor: ray.actor.ActorHandle) -> "Call[None]":
        """Begin to represent another process, which from now on writes to this worker's log."""
        self.actor = actor
        return Call(self, self.actor.log_to.remote(self.log))

    def begin_make(self, module: str, name: str, *arguments: Any) -> "Call[Any]":
        """Begin to create the object that answers calls: import `name` from `module` and call it."""
        return Call(self, self.actor.make.remote(module, name, *arguments))

    def begin_node(self) -> "Call[Any]":
        """Begin to ask for its machine's Ray node ID; answered even while the worker is busy."""
        return Call(self, self.actor.node.options(concurrency_group=_SIGNS).remote())

    def begin_gpus(self) -> "Call[list[str]]":
        """Begin to ask for its GPUs, by Ray's numbers on its machine."""
        return Call(self, self.actor.gpus.remote())

    def begin_listen(self) -> "Call[SocketAddress]":
        """Begin to listen at an address of its machine, until the object is created."""
        return Call(self, self.actor.listen.remote())

    def begin_unreached(self, addresses: Sequence[SocketAddress]) -> "Call[dict[int, str]]":
        """Begin to check which of the addresses it cannot connect to, and why."""
        return Call(self, self.actor.unreached.remote(list(addresses)))

    def begin_free_address(self) -> "Call[tuple[str, int]]":
        """Begin to look for a free port on its machine."""
        return Call(self, self.actor.free_address.remote())

    def begin_start_profiler(self) -> "Call[None]":
        """Begin to start its profiler."""
        return Call(self, self.actor.start_profiler.remote())

    def begin_stop_profiler(self, most_events: int, since_us: float) -> "Call[bytes]":
        """Begin to stop its profiler; the result is the events, see `Profiler.stop`."""
        return Call(self, self.actor.stop_profiler.remote(most_events, since_us))

    def begin(self, method: str, *arguments: Any) -> "Call[Any]":
        """Begin a call of the object's `method`."""
        return Call(self, self.actor.call.remote(method, *arguments))

    def begin_stream(self, method: str, *arguments: Any) -> ray.ObjectRefGenerator:
        """Begin a streaming call of the object's `method`: see `streams`."""
        return self.actor.stream.remote(method, *arguments)

    def begin_end_others(self) -> "Call[None]":
        """Begin to kill what earlier processes in its seat left on its machine."""
        return Call(self, self.actor.end_others.remote(self.log))

    def kill(self) -> None:
        """Kill the process, whatever it is doing."""
        ray.kill(self.actor)

    def end_silent(self) -> WorkerGone:
        """Kill a worker that was silent for too long. Returns its failure."""
        self.failure = WorkerGone(
            f"{self.log.stem} gave no sign of life for {self.silence_s:g} s and was ended",
            "see to its machine and the end of its log, and raise cluster.silence_timeout_s if it was only slow; "
            f"{GOES_ON}",
            self.log,
        )
        self.kill()
        return self.failure

    def end_without(self, gone: WorkerGone) -> None:
        """Kill a worker that needs a dead one, for which it would wait forever."""
        self.failure = gone
        self.kill()


@dataclass(frozen=True)
class Call(Generic[R]):
    """A call in flight in a worker; `wait` returns its result."""

    worker: Worker
    reference: ray.ObjectRef


class Failed(NamedTuple):
    """A call ended with a failure."""

    failure: Exception
