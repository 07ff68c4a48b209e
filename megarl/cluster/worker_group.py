"""A group of worker processes: one call in, all results out, the first failure at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import ray
from ray.exceptions import RayActorError, RayTaskError

from converters.errors import UserError
from megarl.cluster.host import Host
from megarl.cluster.placement import Place
from megarl.cluster.runtime import last_lines

Call: TypeAlias = ray.ObjectRef
"""A call that was begun; `WorkerGroup.wait` gives its result."""


class WorkerFailed(RuntimeError):  # noqa: N818 - says what happened
    """A call failed in a worker, or its process is gone; the message ends with the end of its `log`."""

    def __init__(self, reason: str, log: Path) -> None:
        super().__init__(f"{reason}\nThe end of {log}:\n{last_lines(log)}")


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
        """Make the object that answers the calls: worker i gets `arguments[i]`.

        Raises UserError if the cluster has no room for all workers within the time that `Place` gives.
        """
        up, missing = ray.wait(
            [host.node.remote() for host in self._hosts], num_returns=len(self), timeout=self._place.timeout_s
        )
        if missing:
            raise UserError(
                f"after {self._place.timeout_s:.0f} s only {len(up)} of {len(self)} {self._name} processes run: each "
                f"asks for {self._place.cpus:g} CPUs and {self._place.gpus:g} GPUs, and the cluster has "
                f"{_free(ray.available_resources())} free of {_free(ray.cluster_resources())}"
            )
        self.wait([host.make.remote(module, name, *own) for host, own in zip(self._hosts, arguments, strict=True)])

    def nodes(self) -> set[str]:
        """The machines that the workers run on, as Ray names them."""
        return set(self.wait([host.node.remote() for host in self._hosts]))

    def begin(self, method: str, *arguments: Any) -> list[Call]:
        """Begin a call of every worker."""
        return [host.call.remote(method, *arguments) for host in self._hosts]

    def begin_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Call]:
        """Begin a call of every worker, with arguments of its own."""
        return [host.call.remote(method, *own) for host, own in zip(self._hosts, arguments, strict=True)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call every worker and wait; results in the order of the workers."""
        return self.wait(self.begin(method, *arguments))

    def wait(self, calls: Sequence[Call]) -> list[Any]:
        """Results of all `calls`, one for each worker in order (or none); raises as soon as one of them fails.

        The others may wait for the failed one in a collective, so waiting for them first would never end.
        Raises UserError if that was raised in the worker, else WorkerFailed with the reason and the end of its log.
        """
        log_of = dict(zip(calls, self._logs, strict=False))
        pending = list(calls)
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            try:
                ray.get(done[0])
            except RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                raise WorkerFailed(f"{type(error.cause).__name__}: {error.cause}", log_of[done[0]]) from error
            except RayActorError as error:
                raise WorkerFailed("the process died", log_of[done[0]]) from error
        return ray.get(list(calls))


def _free(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
