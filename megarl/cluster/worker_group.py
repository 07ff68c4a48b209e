"""Worker processes and groups of them: one call in, all results out, the first failure at once."""

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from converters.errors import UserError
from megarl.cluster.reservation import Seats
from megarl.cluster.runtime import last_lines
from megarl.cluster.signs_of_life import SignsOfLife
from megarl.cluster.worker_actor import SocketAddress, WorkerActor
from megarl.process.errors import Resumable, RunFailed

R = TypeVar("R", covariant=True)

# How long the others are given to say that they failed, too.
_CONSEQUENCES_S = 5.0
_LONGEST_S = 24 * 3600.0
"""No call takes so long, not even one that writes files, which may take half of it."""
_IN_VAIN = re.compile(r"Timed out waiting \d+ms for|[Ww]ait timeout after \d+ms")
"""In the error of a collective that waited for somebody in vain, or of its store."""
LOOK_S = 5.0
"""How often workers that are waited for are asked for a sign of life: there may be thousands."""
_SIGNS = "signs"
"""The threads of a worker that give signs of life, whatever else it does."""
_GOES_ON = "the same command continues from the last checkpoint"


class WorkerFailed(Resumable, RuntimeError):  # noqa: N818 - says what happened
    """A call failed in a worker, for a `reason`; `details` are the end of its log, `error` is what was raised there."""

    def __init__(self, reason: str, log: Path, error: BaseException | None = None) -> None:
        self.reason, self.error, self.log = reason, error, log
        self.happened = reason
        self.details = f"The end of {log}:\n{last_lines(log)}"
        super().__init__(f"{reason}\n{self.details}")


class WorkerGone(WorkerFailed, RunFailed):
    """The process of a worker is gone, or does not answer: what `happened`, and what to do."""

    def __init__(self, happened: str, advice: str, log: Path) -> None:
        super().__init__(f"{happened}: {advice}", log)
        self.happened, self.sentence = happened, self.reason


class Worker:
    """The worker process `number` of a role. Its `failure` is the last one that was seen of it."""

    def __init__(self, seats: Seats, number: int, *, logs: Path, calls_at_once: int = 1) -> None:
        role = seats.role
        self.log = logs / f"{role.name}_{number}.log"
        self.silence_s = seats.silence_s
        """How long it may give no sign of life."""
        self.failure: WorkerFailed | None = None
        shared = seats.shared_gpus
        gpus = 0 if shared else role.gpus
        threads = {"max_concurrency": calls_at_once, "concurrency_groups": {_SIGNS: 1}}
        actor = ray.remote(num_cpus=role.cpus, num_gpus=gpus, **threads)(WorkerActor)
        self.actor = actor.options(
            runtime_env={"env_vars": dict(role.environment)}, scheduling_strategy=seats.strategy(number)
        ).remote(self.log, shared[number] if shared else None)

    def begin_adopt(self, actor: ray.actor.ActorHandle) -> "Call[None]":
        """Begin to speak for another process, which from now on writes to this worker's log."""
        self.actor = actor
        return Call(self, self.actor.log_to.remote(self.log))

    def begin_make(self, module: str, name: str, *arguments: Any) -> "Call[Any]":
        """Begin to make the object that answers the calls: import `name` from `module` and call it."""
        return Call(self, self.actor.make.remote(module, name, *arguments))

    def begin_node(self) -> "Call[Any]":
        """Begin to ask for the machine it runs on, as Ray names it; it answers whatever else it does."""
        return Call(self, self.actor.node.options(concurrency_group=_SIGNS).remote())

    def begin_gpus(self) -> "Call[list[str]]":
        """Begin to ask for its GPUs, as Ray numbers those of its machine."""
        return Call(self, self.actor.gpus.remote())

    def begin_listen(self) -> "Call[SocketAddress]":
        """Begin to listen at an address of its machine, until an object is made."""
        return Call(self, self.actor.listen.remote())

    def begin_unreached(self, addresses: Sequence[SocketAddress]) -> "Call[dict[int, str]]":
        """Begin to look which of the addresses it cannot connect to, and why."""
        return Call(self, self.actor.unreached.remote(list(addresses)))

    def begin_free_address(self) -> "Call[tuple[str, int]]":
        """Begin to look for a free port of its machine."""
        return Call(self, self.actor.free_address.remote())

    def begin_start_profiler(self) -> "Call[None]":
        """Begin to record what it does."""
        return Call(self, self.actor.start_profiler.remote())

    def begin_stop_profiler(self) -> "Call[list[dict[str, Any]]]":
        """Begin to end that; the result is the events."""
        return Call(self, self.actor.stop_profiler.remote())

    def begin(self, method: str, *arguments: Any) -> "Call[Any]":
        """Begin a call of the object's `method`."""
        return Call(self, self.actor.call.remote(method, *arguments))

    def begin_stream(self, method: str, *arguments: Any) -> ray.ObjectRefGenerator:
        """Begin a call of the object's `method`, which gives its results one by one: see `streams`."""
        return self.actor.stream.remote(method, *arguments)

    def begin_end_others(self) -> "Call[None]":
        """Begin to end what others that had its seat left on its machine."""
        return Call(self, self.actor.end_others.remote(self.log))

    def kill(self) -> None:
        """End the process, whatever it does."""
        ray.kill(self.actor)

    def end_silent(self) -> WorkerGone:
        """End it, as one that has given no sign of life for as long as it may; the failure that it has died of."""
        self.failure = WorkerGone(
            f"{self.log.stem} gave no sign of life for {self.silence_s:g} s and was ended",
            "see to its machine and the end of its log, and raise cluster.silence_timeout_s if it was only slow; "
            f"{_GOES_ON}",
            self.log,
        )
        self.kill()
        return self.failure


@dataclass(frozen=True)
class Call(Generic[R]):
    """A call that was begun in a worker; `wait` gives its result."""

    worker: Worker
    reference: ray.ObjectRef


class Failed(NamedTuple):
    """A call ended with a failure."""

    failure: Exception


class WorkerGroup:
    """The processes of a role. A context manager: they end with it."""

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
        # After a failure a worker may be stuck in a collective with one that is gone: it is not asked to leave.
        if kind is None:
            self.call("close")
        self.kill()

    def kill(self) -> None:
        """End all processes, whatever they do."""
        for worker in self.workers:
            worker.kill()

    def renew(self, worker: Worker) -> Worker:
        """Begin a new process in the seat of a worker, whose own is killed."""
        number = self.workers.index(worker)
        worker.kill()
        self.workers[number] = renewed = self._worker_in_seat(number)
        return renewed

    def make(self, module: str, name: str, arguments: Sequence[Sequence[Any]]) -> None:
        """Make the object that answers the calls: worker i gets `arguments[i]`. Raises UserError as `nodes`."""
        nodes = self.nodes()
        if self._seats.role.gpus and not self._seats.shared_gpus:
            self.renumber(in_order_of_gpus(nodes, wait([worker.begin_gpus() for worker in self.workers])))
        wait([worker.begin_make(module, name, *own) for worker, own in zip(self.workers, arguments, strict=True)])

    def renumber(self, order: Sequence[int]) -> None:
        """Give number i, with its log, to the process that has number `order[i]`."""
        actors = [self.workers[other].actor for other in order]
        changed = [each for each in zip(self.workers, actors, strict=True) if each[0].actor is not each[1]]
        wait([worker.begin_adopt(actor) for worker, actor in changed])

    def nodes(self) -> list[str]:
        """The machine that each worker runs on, as Ray names it.

        Raises UserError if they are not up within the time that they have.
        """
        calls = [worker.begin_node() for worker in self.workers]
        references = [call.reference for call in calls]
        up, missing = ray.wait(references, num_returns=len(self), timeout=self._seats.timeout_s)
        if missing:
            raise UserError(
                f"after {self._seats.timeout_s:g} s only {len(up)} of {len(self)} {self.name} processes are up: raise"
                " cluster.start_timeout_s if the machines are slow to start them, and see to their Ray nodes if not"
            )
        return wait(calls)

    def begin(self, method: str, *arguments: Any) -> list[Call[Any]]:
        """Begin a call of every worker."""
        return [worker.begin(method, *arguments) for worker in self.workers]

    def begin_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Call[Any]]:
        """Begin a call of every worker, with arguments of its own."""
        return [worker.begin(method, *own) for worker, own in zip(self.workers, arguments, strict=True)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call every worker and wait; results in the order of the workers."""
        return wait(self.begin(method, *arguments))


def in_order_of_gpus(nodes: Sequence[str], gpus: Sequence[Sequence[str]]) -> list[int]:
    """Which worker takes each place, so that those on one machine go up with their GPUs.

    Ray gives GPUs out in any order, while networks connect those of one number on all machines. Example: for workers on
    ["a", "a", "b"] with GPUs [["3"], ["2"], ["0"]] it is [1, 0, 2].
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


def wait(calls: Sequence[Call[R]], timeout_s: float = _LONGEST_S) -> list[R]:
    """Results of all `calls`, in order; raises as soon as one of them fails.

    The others may wait for the failed one in a collective, so waiting for them first would never end.
    Raises UserError or RunFailed if that was raised in the worker, WorkerGone if a process died, was silent for longer
    than it may be or has not answered after `timeout_s`, else WorkerFailed with the reason and the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    pending, results, signs = list(calls), dict[ray.ObjectRef, R](), SignsOfLife[Worker, Call[Any]](LOOK_S)
    while pending:
        left = max(0.0, deadline - time.monotonic())
        all_done = _done(pending, min(left, LOOK_S))
        if not all_done:
            if left > LOOK_S:
                end_silent([call.worker for call in pending], signs)
                continue
            worker = pending[0].worker
            silent = f"{worker.log.stem} gave no answer for {timeout_s:g} s"
            worker.failure = WorkerGone(silent, "see the end of its log", worker.log)
            raise worker.failure
        for done in all_done:
            pending.remove(done)
            answer = answer_of(done)
            if isinstance(answer, Failed):
                raise _cause(answer.failure, pending)
            results[done.reference] = answer
    return [results[call.reference] for call in calls]


def wait_together(
    calls: Sequence[Call[Any]],
    consequence: type[Exception],
    at_first: Callable[[Exception], None] = lambda _failure: None,
) -> None:
    """Wait for calls of workers, of any groups, that need each other.

    Where one fails, the others soon fail for that reason, with a `consequence`; `at_first` is called with the first
    failure, so that it can tell those that do not hear of it. Raises, as `wait` does, the failure that says most: the
    end of a process, then any error but a consequence.
    """
    pending, signs = list(calls), SignsOfLife[Worker, Call[Any]](LOOK_S)
    failures: list[Exception] = []
    while pending:
        done = _first_done(pending, _CONSEQUENCES_S if failures else LOOK_S)
        if done is None:
            if failures:
                break
            end_silent([call.worker for call in pending], signs)
            continue
        pending.remove(done)
        if isinstance(answer := answer_of(done), Failed):
            if not failures:
                at_first(answer.failure)
            failures.append(answer.failure)
    if failures:
        raise min(failures, key=lambda failure: _depth(failure, consequence))


def end_silent(workers: Collection[Worker], signs: SignsOfLife[Worker, Call[Any]]) -> None:
    """Look for signs of life of workers that are waited for; those that were silent too long end, and so do calls."""
    for worker in signs.look({worker: worker.begin_node for worker in workers}).silent:
        worker.end_silent()


def unfinished(calls: Sequence[Call[R]], timeout_s: float = 0.0) -> list[Call[R]]:
    """The calls that have not ended when the time is over."""
    references = [call.reference for call in calls]
    left = set(ray.wait(references, num_returns=len(references), timeout=timeout_s)[1])
    return [call for call in calls if call.reference in left]


def _first_done(calls: Sequence[Call[R]], timeout_s: float) -> Call[R] | None:
    """The first of the calls that has ended; None if none has within the time."""
    return next(iter(_done(calls, timeout_s)), None)


def _done(calls: Sequence[Call[R]], timeout_s: float) -> list[Call[R]]:
    """The calls that have ended when the first one has; none if that takes longer than the time."""
    references = [call.reference for call in calls]
    if not ray.wait(references, num_returns=1, timeout=timeout_s)[0]:
        return []
    done = set(ray.wait(references, num_returns=len(references), timeout=0)[0])
    return [call for call in calls if call.reference in done]


def _depth(failure: Exception, consequence: type[Exception] | tuple[()]) -> int:
    error = failure.error if isinstance(failure, WorkerFailed) else failure
    return 0 if error is None else 2 if isinstance(error, consequence) else 1


def _cause(failure: Exception, pending: Sequence[Call[Any]]) -> Exception:
    """The reason of an error that is a consequence: the death of another worker, which comes to light soon after it, or
    one that stands still, for which the others waited in a collective until its time was over.
    """
    if _depth(failure, ()) != 1:
        return failure
    deadline = time.monotonic() + _CONSEQUENCES_S
    left = list(pending)
    while left and (seconds := deadline - time.monotonic()) > 0:
        done = _first_done(left, seconds)
        if done is None:
            break
        left.remove(done)
        other = answer_of(done)
        if isinstance(other, Failed) and isinstance(other.failure, WorkerGone):
            return other.failure
    if left and isinstance(failure, WorkerFailed) and _IN_VAIN.search(failure.reason):
        return _missing([call.worker for call in left], failure)
    return failure


def _missing(workers: Sequence[Worker], failure: WorkerFailed) -> WorkerGone:
    """The failure of workers that did not come to a collective, in which another one failed."""
    names = [worker.log.stem for worker in workers]
    who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    first = workers[0]
    first.failure = WorkerGone(
        f"{who} did not come to a collective in which {failure.log.stem} waited ({failure.reason})",
        "the end of its log may say where it stands, and cluster.collective_timeout_s is to be raised if it was only "
        f"slow; {_GOES_ON}",
        first.log,
    )
    return first.failure


def answer_of(done: Call[R]) -> "R | Failed":
    """The result of a call that has ended, or why it failed. Each time it is asked for, Ray makes a copy."""
    log = done.worker.log
    try:
        return ray.get(done.reference)
    except RayTaskError as error:
        if isinstance(error.cause, UserError | RunFailed):
            return Failed(error.cause)
        failure = WorkerFailed(f"{type(error.cause).__name__}: {error.cause}", log, error.cause)
        if not isinstance(done.worker.failure, WorkerGone):  # of one that is gone nothing later counts
            done.worker.failure = failure
        return Failed(failure)
    except ObjectLostError:
        happened = f"a result of {log.stem} is gone with the machine that had it"
        done.worker.failure = WorkerGone(happened, f"see to the machine; {_GOES_ON}", log)
    except OutOfMemoryError:
        happened = f"Ray ended {log.stem}, because the memory of its machine was nearly full"
        advice = (
            "leave the machine to the run, or make it smaller (loop.max_tokens_per_micro_batch, fewer ranks or engines)"
        )
        done.worker.failure = WorkerGone(happened, f"{advice}; {_GOES_ON}", log)
    except RayActorError as error:
        happened = f"the process of {log.stem} died"
        if "node has died" in str(error):
            happened, advice = f"{log.stem} is gone with the Ray node that it was on", "see to the machine"
        else:
            advice = "where its log says nothing, the kernel may have ended it for want of memory (dmesg tells)"
        if not isinstance(done.worker.failure, WorkerGone):  # else it was ended for that
            done.worker.failure = WorkerGone(happened, f"{advice}; {_GOES_ON}", log)
    return Failed(done.worker.failure)
