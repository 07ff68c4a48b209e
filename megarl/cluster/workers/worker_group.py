"""The worker processes of a role, called together."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple

import ray

from megarl.cluster.placement.reservation import Seats
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import Call, Worker
from megarl.process.errors import MachinesUnfit

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class WorkerGroup:
    """The processes of a role. As a context manager it ends them on exit."""

    def __init__(self, seats: Seats, logs: Path, calls_at_once: int = 1) -> None:
        self.name = seats.role.name
        """The role of the processes."""
        self._seats = seats
        self._worker_in_seat = partial(Worker, seats, logs=logs, calls_at_once=calls_at_once)
        self.workers = [self._worker_in_seat(number) for number in range(len(seats))]

    def __len__(self) -> int:
        return len(self.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure workers are not asked to close: they may be stuck in a collective with a dead one.
        if kind is None:
            wait([worker.begin("close") for worker in self.workers])
        self.kill()

    def kill(self) -> None:
        """Kill all processes, whatever they are doing."""
        for worker in self.workers:
            worker.kill()

    def renew(self, worker: Worker) -> Worker:
        """Kill a worker's process and begin a new one in its seat."""
        number = self.workers.index(worker)
        worker.kill()
        self.workers[number] = renewed = self._worker_in_seat(number)
        return renewed

    def make(self, module: str, name: str, arguments: Sequence[Sequence[Any]]) -> None:
        """Create the objects that answer calls: worker i gets `arguments[i]`. Raises UserError as `nodes`."""
        nodes = self.nodes()
        if self._seats.role.gpus and not self._seats.shared_gpus:
            self.renumber(in_order_of_gpus(nodes, wait([worker.begin_gpus() for worker in self.workers])))
        wait([worker.begin_make(module, name, *own) for worker, own in zip(self.workers, arguments, strict=True)])

    def renumber(self, order: Sequence[int]) -> None:
        """Give number i, with its log, to the process whose number is `order[i]`."""
        actors = [self.workers[other].actor for other in order]
        changed = [each for each in zip(self.workers, actors, strict=True) if each[0].actor is not each[1]]
        wait([worker.begin_adopt(actor) for worker, actor in changed])

    def nodes(self) -> list[str]:
        """The Ray node ID of each worker's machine.

        Raises UserError if they are not up in time.
        """
        calls = [worker.begin_node() for worker in self.workers]
        references = [call.reference for call in calls]
        up, missing = ray.wait(references, num_returns=len(self), timeout=self._seats.timeout_s)
        if missing:
            raise MachinesUnfit(
                f"after {self._seats.timeout_s:g} s only {len(up)} of {len(self)} {self.name} processes are up: raise"
                " cluster.start_timeout_s if the machines are slow to start them, and see to their Ray nodes if not"
            )
        return wait(calls)

    def begin(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> list[Call[R]]:
        """Begin a call of a method in every worker."""
        return [worker.begin(method.__name__, *arguments) for worker in self.workers]

    def begin_each(self, method: Callable[..., R], arguments: Sequence[Sequence[Any]]) -> list[Call[R]]:
        """Begin a call of every worker, with arguments of its own."""
        return [worker.begin(method.__name__, *own) for worker, own in zip(self.workers, arguments, strict=True)]

    def call(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> list[R]:
        """Call every worker and wait; results in the order of the workers."""
        return wait(self.begin(method, *arguments))

    def call_first(self, method: Callable[[Any, *Ts], R], *arguments: *Ts) -> R:
        """Call the first worker and wait for its result."""
        return wait([self.workers[0].begin(method.__name__, *arguments)])[0]


def in_order_of_gpus(nodes: Sequence[str], gpus: Sequence[Sequence[str]]) -> list[int]:
    """The worker for each rank, such that ranks on one machine ascend with their GPUs.

    Ray assigns GPUs in any order, while rail-optimised networks connect GPUs of the same number across machines.
    Example: for workers on ["a", "a", "b"] with GPUs [["3"], ["2"], ["0"]] it is [1, 0, 2].
    """
    by_gpu = {
        node: iter(
            sorted(
                (place for place, own in enumerate(nodes) if own == node),
                key=lambda place: [(len(gpu), gpu) for gpu in gpus[place]],
            )
        )
        for node in set(nodes)
    }
    return [next(by_gpu[node]) for node in nodes]
