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

# Enough for events, requests, their end, a stream of tokens, an update and a question about health at the same time.
_CALLS_AT_ONCE = 6
_MOST_RECORDED = 8
"""Engines that are all in a timeline. More do much the same: one of them is there, with room for its events."""


class EngineGroup(Engines):
    """Engines, each in a process of its own. A context manager: they end with it."""

    def __init__(
        self,
        config: RolloutConfig,
        seats: Seats,
        logs: Path,
        restarts: int = 0,
        start_within_s: float = ClusterConfig.engine_start_timeout_s,
    ) -> None:
        """Engines that die are restarted, at most `restarts` times in all.

        One whose processes are up starts within so many seconds, or has died.
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
        # First of all: it restarts what it finds dead.
        self._router.close()
        if kind is None:
            # One that is down, dies now or is just starting has nothing that would not end with its process.
            wait_for_living([process.begin("close") for handle in self.up for process in handle.processes])
        self.processes.kill()

    def nodes(self) -> list[str]:
        """The machine of every process of the engines. Raises UserError if they are not up in time."""
        return self.processes.nodes()

    def begin_start(self, model_path: Path, *, load_weights: bool, adapter: Lora | None = None) -> list[Call[None]]:
        """Begin to start all engines; they are up when `wait_started` returns.

        Without `load_weights` their first weights come by a refit. With an `adapter` refits bring this alone.
        Raises UserError for a model that does not fit the number format of the engines, or the slot of an adapter.
        """
        self._starter.set_arguments(model_path, load_weights=load_weights, adapter=adapter)
        self.nodes()  # first of all there has to be room for them
        making = {handle: self._starter.make(handle) for handle in self.handles}
        # One that dies meanwhile is made anew by its restart.
        while steps := [calls for handle, each in making.items() if handle.is_up and (calls := next(each, None))]:
            self._wait_beginning([call for calls in steps for call in calls])
        return [call for handle in self.up for call in handle.begin_start()]

    def wait_started(self, calls: Sequence[Call[None]]) -> None:
        """Wait for what `begin_start` began. One whose process dies is restarted: raises as `Restarts.begin`.

        Raises MachinesUnfit with the end of the log if an engine does not start.
        """
        try:
            self._wait_beginning(calls)
        except WorkerGone:
            raise  # whoever ended it, it was not the configuration
        except WorkerFailed as error:
            # It may have started with the same arguments before, and have met the memory of others, or a bad disk, now.
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
        """Wait until engines have started; restart an engine that dies meanwhile, and drop its calls."""
        while left := [call for call in calls if call.worker in self.processes.workers]:
            try:
                wait(left, self._start_within_s, "cluster.engine_start_timeout_s")
                return
            except WorkerGone:
                if not self.restart_dead():
                    raise

    def recover_with(self, give_weights: Callable[[], object]) -> None:
        """Let engines that were restarted have from `give_weights` all that refits bring, not from the folder."""
        self._starter.leave_weights_to_refits()
        self._restarts.give_weights = give_weights

    def count_memory(self, memory: CountedMemory) -> None:
        """Count what the engines hold, from now on, where there is no GPU to do it."""
        self._starter.memory = memory
        self._call(self.up, Engine.count_memory, memory)

    def start_profiler(self) -> None:
        """Begin to record what all processes of the engines do, or of the first that is up where there are many."""
        self._recorded = self.up if len(self.handles) <= _MOST_RECORDED else self.up[:1]
        calls = [(each, process.begin_start_profiler()) for each in self._recorded for process in each.processes]
        self._wait_for_survivors(calls)
        self._call([each for each in self._recorded if each.is_up], Engine.start_profiler)

    def stop_profiler(self, most_events: int, since_us: float) -> dict[str, bytes]:
        """End that: the events of each process, by its name; an engine that has died has none.

        There are `most_events` of all engines together. See `Profiler.stop`.
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
        """The state of the engines in a checkpoint: their restarts."""
        return self._restarts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count restarts on from a checkpoint."""
        self._restarts.load_state_dict(state)

    def begin_steps(self) -> None:
        """Measure the first step from here on: the time of the start, in which engines are idle, is none of it."""
        self._step_began_s = time.monotonic()
        self._queue.take_idle_s()

    def end_step(self) -> dict[str, float]:
        """Metrics of engines that died, or of what they had to sample, since the last step."""
        now_s = time.monotonic()
        seconds, self._step_began_s = now_s - self._step_began_s, now_s
        # How long each had nothing to sample.
        idle_s = self._queue.take_idle_s()
        return {
            **self._restarts.end_step(),
            **load_metrics(self.handles),
            "throughput/engines_idle": sum(idle_s) / len(idle_s) / seconds,
            "engines/tokens_moved": float(self._queue.take_moved()),
        }
