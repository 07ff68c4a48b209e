"""A group of worker processes: one call in, all results out, the first failure at once."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from converters.errors import UserError
from megarl.cluster.host import Host
from megarl.cluster.placement import Place
from megarl.cluster.runtime import last_lines
from megarl.process.errors import RunFailed

Call: TypeAlias = ray.ObjectRef
"""A call that was begun; `WorkerGroup.wait` gives its result."""


# How long the others are given to say that they failed, too.
_CONSEQUENCES_S = 5.0
_GOES_ON = "the same command continues from the last checkpoint"


class WorkerFailed(RuntimeError):  # noqa: N818 - says what happened
    """A call failed in a worker, for a `reason`; `details` are the end of its log, `error` is what was raised there."""

    def __init__(self, reason: str, log: Path, error: BaseException | None = None) -> None:
        self.reason, self.error = reason, error
        self.details = f"The end of {log}:\n{last_lines(log)}"
        super().__init__(f"{reason}\n{self.details}")


class WorkerGone(WorkerFailed, RunFailed):
    """The process of a worker is gone, or does not answer; the reason also says what to do."""

    def __init__(self, reason: str, log: Path) -> None:
        super().__init__(reason, log)
        self.sentence = reason


class WorkerGroup:
    """Processes that run the same program. A context manager: they end with it."""

    def __init__(self, name: str, size: int, place: Place, logs: Path, calls_at_once: int = 1) -> None:
        self._name = name
        self._place = place
        self._logs = [logs / f"{name}_{index}.log" for index in range(size)]
        actor = ray.remote(num_cpus=place.cpus, num_gpus=place.gpus, max_concurrency=calls_at_once)(Host)
        started = actor.options(runtime_env={"env_vars": dict(place.environment)})
        self._hosts = [started.remote(log) for log in self._logs]

    def __len__(self) -> int:
        return len(self._hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure a worker may be stuck in a collective with one that is gone: it is not asked to leave.
        if kind is None:
            self.call("close")
        for host in self._hosts:
            ray.kill(host)

    def make(self, module: str, name: str, arguments: Sequence[Sequence[Any]]) -> None:
        """Make the object that answers the calls: worker i gets `arguments[i]`. Raises UserError as `nodes`."""
        self.nodes()
        self.wait([host.make.remote(module, name, *own) for host, own in zip(self._hosts, arguments, strict=True)])

    def nodes(self) -> list[str]:
        """The machine that each worker runs on, as Ray names it.

        Raises UserError if the cluster has no room for all workers within the time that `Place` gives.
        """
        calls = [host.node.remote() for host in self._hosts]
        up, missing = ray.wait(calls, num_returns=len(self), timeout=self._place.timeout_s)
        if missing:
            raise UserError(
                f"after {self._place.timeout_s:.0f} s only {len(up)} of {len(self)} {self._name} processes run: each "
                f"asks for {self._place.cpus:g} CPUs and {self._place.gpus:g} GPUs, and the cluster has "
                f"{_free(ray.available_resources())} free of {_free(ray.cluster_resources())}"
            )
        return self.wait(calls)

    def begin(self, method: str, *arguments: Any) -> list[Call]:
        """Begin a call of every worker."""
        return [host.call.remote(method, *arguments) for host in self._hosts]

    def begin_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Call]:
        """Begin a call of every worker, with arguments of its own."""
        return [host.call.remote(method, *own) for host, own in zip(self._hosts, arguments, strict=True)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call every worker and wait; results in the order of the workers."""
        return self.wait(self.begin(method, *arguments))

    def stream_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        """Yield the items that a method of every worker yields, as they come, each with its worker's index.

        Raises as `wait` does.
        """
        streams = {
            host.stream.remote(method, *own): index
            for index, (host, own) in enumerate(zip(self._hosts, arguments, strict=True))
        }
        while streams:
            (ready,), _ = ray.wait(list(streams), num_returns=1)
            result = next(ready, None)
            if result is None:
                del streams[ready]
                continue
            if failure := _failure(result, self._logs[streams[ready]]):
                raise failure
            yield streams[ready], ray.get(result)

    def wait(self, calls: Sequence[Call], timeout_s: float | None = None) -> list[Any]:
        """Results of all `calls`, one for each worker in order (or none); raises as soon as one of them fails.

        The others may wait for the failed one in a collective, so waiting for them first would never end.
        Raises UserError if that was raised in the worker, WorkerGone if a process died or has not answered after
        `timeout_s`, else WorkerFailed with the reason and the end of its log.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        log_of = self.log_of(calls)
        pending = list(calls)
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=left)
            if not done:
                log = log_of[pending[0]]
                raise WorkerGone(f"{log.stem} gave no answer for {timeout_s:g} s: see the end of its log", log)
            if failure := _failure(done[0], log_of[done[0]]):
                raise _cause(failure, {call: log_of[call] for call in pending})
        return ray.get(list(calls))

    def log_of(self, calls: Sequence[Call]) -> dict[Call, Path]:
        """Each call, one for each worker, with the worker's log."""
        return dict(zip(calls, self._logs, strict=False))


def wait_together(log_of: Mapping[Call, Path], consequence: type[Exception]) -> None:
    """Wait for calls of workers, of any groups, that need each other; `log_of` is from `WorkerGroup.log_of`.

    Where one fails, the others soon fail for that reason, with a `consequence`. Raises, as `WorkerGroup.wait` does, the
    failure that says most: the end of a process, then any error but a consequence.
    """
    pending = list(log_of)
    failures: list[Exception] = []
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=_CONSEQUENCES_S if failures else None)
        if not done:
            break
        if failure := _failure(done[0], log_of[done[0]]):
            failures.append(failure)
    if failures:
        raise min(failures, key=lambda failure: _depth(failure, consequence))


def _depth(failure: Exception, consequence: type[Exception] | tuple[()]) -> int:
    error = failure.error if isinstance(failure, WorkerFailed) else failure
    return 0 if error is None else 2 if isinstance(error, consequence) else 1


def _cause(failure: Exception, pending: Mapping[Call, Path]) -> Exception:
    """The death of another worker that comes to light soon after an error, which then is its consequence."""
    if _depth(failure, ()) != 1:
        return failure
    deadline = time.monotonic() + _CONSEQUENCES_S
    left = list(pending)
    while left and (seconds := deadline - time.monotonic()) > 0:
        done, left = ray.wait(left, num_returns=1, timeout=seconds)
        for call in done:
            if isinstance(other := _failure(call, pending[call]), WorkerGone):
                return other
    return failure


def _failure(done: Call, log: Path) -> Exception | None:
    """Why a call that has ended failed; None if it did not."""
    try:
        ray.get(done)
    except RayTaskError as error:
        cause = error.cause
        return cause if isinstance(cause, UserError) else WorkerFailed(f"{type(cause).__name__}: {cause}", log, cause)
    except OutOfMemoryError:
        return WorkerGone(
            f"Ray ended {log.stem}, because the memory of its machine was nearly full: leave the machine to the run, "
            f"or make it smaller (loop.max_tokens_per_micro_batch, fewer ranks or engines); {_GOES_ON}",
            log,
        )
    except RayActorError as error:
        if "node has died" in str(error):
            return WorkerGone(
                f"{log.stem} is gone with the Ray node that it was on: see to the machine; {_GOES_ON}", log
            )
        return WorkerGone(
            f"the process of {log.stem} died: where the end of its log says nothing, the kernel may have ended it for "
            f"want of memory (dmesg tells); {_GOES_ON}",
            log,
        )
    return None


def _free(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
