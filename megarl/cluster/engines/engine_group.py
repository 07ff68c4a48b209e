"""The engines of a run: their processes, their start, and replacements for engines that died."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from converters.architectures import Lora
from converters.number_formats import number_format
from megarl.cluster.engines.engine_handle import EngineHandle, wait_for_living
from megarl.cluster.engines.engine_load import load_metrics
from megarl.cluster.engines.engine_starter import EngineStarter
from megarl.cluster.engines.engines import Engines, SharedByEngines
from megarl.cluster.engines.restarts import Restarts, StartStages
from megarl.cluster.engines.router import Router
from megarl.cluster.placement.reservation import Seats
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import Call, WorkerFailed, WorkerGone
from megarl.cluster.workers.worker_group import WorkerGroup
from megarl.process.errors import MachinesUnfit
from megarl.rollout import engine_kind
from megarl.rollout.protocol import Engine
from megarl.schema import ClusterConfig, RolloutConfig
from megatron_ext.memory.device_memory import CountedMemory

# Enough for concurrent calls of events, submit, abort, a token stream, an update and a heartbeat.
_CALLS_AT_ONCE = 6
_MOST_RECORDED = 8
"""Up to this many engines are all recorded. If there are more, which do much the same, one is, with room for its
events.
"""


class EngineGroup(Engines):
    """Engines, each in a process of its own. As a context manager it ends them on exit."""

    def __init__(
        self,
        config: RolloutConfig,
        seats: Seats,
        logs: Path,
        restarts: int = 0,
        start_within_s: float = ClusterConfig.engine_start_timeout_s,
    ) -> None:
        """Dead engines are restarted, at most `restarts` times in total.

        An engine whose processes are up must start within `start_within_s`, or counts as dead.
        """
        kind = engine_kind(config.engine)
        nodes = kind.nodes(config.engine_args)
        self.processes = WorkerGroup(seats, logs, calls_at_once=_CALLS_AT_ONCE)
        workers = self.processes.workers
        most = kind.max_concurrent_samples(config.engine_args)
        handles = [EngineHandle(workers[start : start + nodes], most) for start in range(0, len(workers), nodes)]
        self._starter = EngineStarter(config, kind, self.processes)
        self._start_within_s = start_within_s
        stages = StartStages(self._starter.prepare, self._starter.load)
        again = Restarts(restarts, stages, up_within_s=seats.timeout_s, start_within_s=start_within_s)
        shared = SharedByEngines(again, Router(handles, again), number_format(config.weights))
        super().__init__(handles, shared)
        self._step_began_s = time.monotonic()
        self._recorded: list[EngineHandle] = []

    def __enter__(self) -> Self:
        self.processes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closed first, because it restarts engines that it finds dead.
        self._router.close()
        if kind is None:
            # An engine that is down, starting, or dies now leaves nothing behind when its process is killed.
            wait_for_living([process.begin("close") for handle in self.up for process in handle.processes])
        self.processes.kill()

    def nodes(self) -> list[str]:
        """The machine of every engine process. Raises UserError if they are not up in time."""
        return self.processes.nodes()

    def begin_start(self, model_path: Path, *, load_weights: bool, adapter: Lora | None = None) -> list[Call[None]]:
        """Begin to start all engines; they are up when `wait_started` returns.

        Without `load_weights` the first refit brings their weights. With an `adapter`, refits bring only the adapter.
        Raises UserError for a model that does not fit the engines' number format or adapter slot.
        """
        self._starter.set_arguments(model_path, load_weights=load_weights, adapter=adapter)
        self.nodes()  # waits until there is room for them
        making = {handle: self._starter.make(handle) for handle in self.handles}
        # An engine that dies meanwhile is created again by its restart.
        while steps := [calls for handle, each in making.items() if handle.is_up and (calls := next(each, None))]:
            self._wait_beginning([call for calls in steps for call in calls])
        return [call for handle in self.up for call in handle.begin_start()]

    def wait_started(self, calls: Sequence[Call[None]]) -> None:
        """Wait for the calls of `begin_start`. An engine whose process dies is restarted: raises as `Restarts.begin`.

        Raises MachinesUnfit, with the end of the log, if an engine fails to start.
        """
        try:
            self._wait_beginning(calls)
        except WorkerGone:
            raise  # the configuration was not the cause
        except WorkerFailed as error:
            # The same arguments may have worked before; the cause may be memory in use by others, or a bad disk.
            raise MachinesUnfit(
                f"an engine did not start, check rollout.engine_args, model.path and its machine: {error.reason}",
                error.details,
            ) from error
        self.wait_for_all()
        versions, parts = wait(self.begin(Engine.version)), wait(self.begin(Engine.worker_parts))
        for handle, version, worker_parts in zip(self.handles, versions, parts, strict=True):
            handle.note_started(version, worker_parts)
        self._restarts.note_started(self.handles)

    def _wait_beginning(self, calls: Sequence[Call[None]]) -> None:
        """Wait until engines have started; restart any that dies meanwhile, and drop its calls."""
        while left := [call for call in calls if call.worker in self.processes.workers]:
            try:
                wait(left, self._start_within_s, "cluster.engine_start_timeout_s")
                return
            except WorkerGone:
                if not self.restart_dead():
                    raise

    def recover_with(self, give_weights: Callable[[], object]) -> None:
        """Let restarted engines get everything that refits bring from `give_weights`, not from the folder."""
        self._starter.leave_weights_to_refits()
        self._restarts.give_weights = give_weights

    def count_memory(self, memory: CountedMemory) -> None:
        """From now on count the engines' memory in `memory`, which stands in for a GPU's limit."""
        self._starter.memory = memory
        self._call(self.up, Engine.count_memory, memory)

    def start_profiler(self) -> None:
        """Start recording all processes of the engines; of many engines, only of the first that is up."""
        self._recorded = self.up if len(self.handles) <= _MOST_RECORDED else self.up[:1]
        calls = [(each, process.begin_start_profiler()) for each in self._recorded for process in each.processes]
        self._wait_for_survivors(calls)
        self._call([each for each in self._recorded if each.is_up], Engine.start_profiler)

    def stop_profiler(self, most_events: int, since_us: float) -> dict[str, bytes]:
        """Stop recording; return the events by process name, without engines that have died.

        At most `most_events` for all engines together. See `Profiler.stop`.
        """
        recorded = [each for each in self._recorded if each.is_up]
        limits = most_events // max(len(recorded), 1), since_us
        calls = [(each, process.begin_stop_profiler(*limits)) for each in recorded for process in each.processes]
        found = {process.log.stem: events for process, events in self._wait_for_survivors(calls)}
        stopping = [(each, each.begin(Engine.stop_profiler, *limits)) for each in recorded if each.is_up]
        for process, started in self._wait_for_survivors(stopping):
            found |= {f"{process.log.stem} {name}": events for name, events in started.items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of the engines for a checkpoint: their restarts."""
        return self._restarts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the count of restarts from a checkpoint."""
        self._restarts.load_state_dict(state)

    def begin_steps(self) -> None:
        """Measure the first step from here on, without the time of the start, in which engines are idle."""
        self._step_began_s = time.monotonic()
        self._queue.take_idle_s()

    def end_step(self) -> dict[str, float]:
        """Return metrics of restarts, load and idle time since the last step."""
        now_s = time.monotonic()
        seconds, self._step_began_s = now_s - self._step_began_s, now_s
        # Seconds that each engine had nothing to sample.
        idle_s = self._queue.take_idle_s()
        return {
            **self._restarts.end_step(),
            **load_metrics(self.handles),
            "throughput/engines_idle": sum(idle_s) / len(idle_s) / seconds,
            "engines/tokens_moved": float(self._queue.take_moved()),
        }
