"""Restarts dead engines in the background: new processes in the old seats, then weights."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, Literal, NamedTuple, TypeAlias

import ray

from converters.errors import UserError
from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.workers.calls import HEARTBEAT_INTERVAL_S, end_silent, wait
from megarl.cluster.workers.heartbeats import Heartbeats
from megarl.cluster.workers.worker import GOES_ON, Call, Worker, WorkerFailed, WorkerGone
from megarl.process.logs import say
from megarl.resharding.direct.connections import TransferError

Steps: TypeAlias = Callable[[EngineHandle], Iterator[Sequence[Call[Any]]]]
"""Advances an engine step by step: yields the calls, at least one, that must end before the next step."""
_POLL_S = 1.0
_WAITS_S = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 600.0)
"""Waits before further tries of an engine that failed to restart: memory, ports and disks may come back."""
_TRIES_WITHIN_S = 7200.0
"""How long after a death further tries may begin: a start that hangs takes an hour."""


class StartStages(NamedTuple):
    """The two stages of a restart; only the second one allocates device memory."""

    prepare: Steps
    load: Steps


class _Cause(NamedTuple):
    """Why an engine died: a sentence, its log, and the end of the log at that time."""

    reason: str
    log: str
    details: str


@dataclass
class _Restart:
    """The restart of one engine."""

    steps: Iterator[Sequence[Call[Any]]]
    """The remaining steps of this stage."""
    died_s: float
    until_s: float
    """Deadline of the present step."""
    calls: list[Call[Any]] = field(default_factory=list)
    """Calls that the present step waits for."""
    is_up: bool = False
    """Whether the first step has ended: new processes are up, and nothing is left of the old ones."""
    stage: Literal["prepare", "prepared", "load", "loaded"] = "prepare"
    number: int = 1
    """Number of this try since the death."""
    begins_at_s: float = 0.0
    """Earliest time of the first step, which ends the remains of an earlier try."""
    goes_on_at_s: float = 0.0
    """Earliest time of the later steps."""
    heartbeats: Heartbeats[Worker, Call[Any]] = field(default_factory=lambda: Heartbeats(HEARTBEAT_INTERVAL_S))

    @property
    def is_early(self) -> bool:
        """Whether it is too early for the next step."""
        return time.monotonic() < (self.goes_on_at_s if self.is_up else self.begins_at_s)


class Restarts:
    """The restarts of a run's engines: at most `max_restarts`, including those before the checkpoint it resumed from.

    A restart that fails is tried again a few times, with growing waits, while the other engines serve; these tries do
    not count. But if not all engines of the run have ever started, the arguments may be wrong, and a failed start
    counts.

    An engine whose machine is gone is not restarted, as its place is on that machine; the next try of the run finds
    another place.

    Nothing advances by itself: a restart takes its next step when a thread that waits for engines calls `advance`. So
    the trainer's ranks are asked for weights only when they have nothing else to do. After `pause`, while the trainer
    has the GPUs, an engine's processes are started but load nothing.
    """

    def __init__(self, max_restarts: int, start: StartStages, *, up_within_s: float, start_within_s: float) -> None:
        """Time limits: processes come up within `up_within_s` and the engine then starts within `start_within_s`."""
        self.count = 0
        """Number of restarts so far."""
        self.give_weights: Callable[[], object] = lambda: None
        """Gives weights to restarted engines that are up; does nothing if engines read them from a folder."""
        self._max_restarts, self._start = max_restarts, start
        self._up_within_s, self._start_within_s = up_within_s, start_within_s
        self._first: _Cause | None = None
        self._under_way: dict[EngineHandle, _Restart] = {}
        self._started: list[EngineHandle] = []
        """The engines of the run, once all have started."""
        self._is_paused = False
        self._seconds: list[float] = []
        self._failed_starts = 0
        self.lock = RLock()
        """Guards the restarts, which the router's thread and the thread of refits both advance."""

    @property
    def calls(self) -> list[Call[Any]]:
        """The calls in flight; when one ends, `advance` has something to do."""
        # Another thread may begin or end a restart meanwhile; copying to a list is atomic.
        return [call for each in list(self._under_way.values()) for call in each.calls]

    @property
    def is_paused(self) -> bool:
        """Whether loading of weights is paused until `resume`."""
        return self._is_paused

    def awaits(self, handle: EngineHandle) -> bool:
        """Whether an engine is being restarted and has no weights yet."""
        return handle in self._under_way

    def begin(self, handle: EngineHandle) -> None:
        """Begin to restart an engine that is down. Raises its failure, or the run's first one, if that is one too many.

        Does nothing if its restart has already begun.
        """
        with self.lock:
            if (failure := handle.death) is None or handle.state != "down":
                return
            if (restart := self._under_way.get(handle)) is None:
                self._begin(handle, failure, time.monotonic())
            else:
                self._retry(handle, failure, restart)

    def retry(self, failure: WorkerFailed) -> bool:
        """Try again an engine whose restart met this failure; return whether there is one. Raises as `begin`.

        The engine may be alive, such as one without enough memory for its first weights.
        """
        with self.lock:
            for handle, restart in list(self._under_way.items()):
                if any(_is_same(process.failure, failure) for process in handle.processes):
                    self._retry(handle, failure, restart)
                    return True
        return False

    def advance(self) -> None:
        """Take all steps that are possible without waiting. Raises as `begin`."""
        with self.lock:
            for handle, restart in list(self._under_way.items()):
                self._advance(handle, restart)

    def recover(self) -> None:
        """Do as `advance`, then give restarted engines that are up the weights that the others serve."""
        with self.lock:
            self.advance()
            if any(handle.state == "starting" for handle in self._under_way):
                self.give_weights()

    def wait(self) -> None:
        """Wait until a step may be possible, and take it. Raises as `begin`."""
        if calls := self.calls:
            ray.wait([call.reference for call in calls], num_returns=1, timeout=_POLL_S)
        else:
            time.sleep(_POLL_S)
        self.advance()

    def pause(self) -> None:
        """Keep engines from allocating memory until `resume`. Raises as `begin`.

        Returns when engines that had begun to load are up, and nothing is left of dead ones.
        """
        with self.lock:
            self._is_paused = True
            while any(each.stage == "load" or not each.is_up for each in self._under_way.values()):
                self.wait()

    def resume(self) -> None:
        """Let engines allocate memory again. Raises as `begin`."""
        with self.lock:
            self._is_paused = False
            self.advance()

    def note_started(self, handles: Sequence[EngineHandle]) -> None:
        """Note that all engines of the run have started once, so that later failures to start may be temporary."""
        self._started = list(handles)

    def note_serving(self, handle: EngineHandle) -> None:
        """Note that an engine has weights, which ends its restart, if it had one."""
        with self.lock:
            if (restart := self._under_way.pop(handle, None)) is not None:
                self._seconds.append(seconds := time.monotonic() - restart.died_s)
                say(f"{handle.name} serves again, {seconds:.1f} s after it died, with weights {handle.version}")

    def state_dict(self) -> dict[str, Any]:
        """The number of restarts, and the cause of the first."""
        return {"count": self.count, "first": self._first and self._first._asdict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.count = state["count"]
        self._first = _Cause(**state["first"]) if state["first"] else None

    def end_step(self) -> dict[str, float]:
        """Return metrics: the run's restarts and, since the last step, failed tries and the longest restart."""
        with self.lock:
            metrics = {
                "engines/restarts": float(self.count),
                "engines/failed_starts": float(self._failed_starts),
                "engines/down": float(len(self._under_way)),
            }
            if self._seconds:
                metrics["engines/seconds_down"] = max(self._seconds)
            self._seconds, self._failed_starts = [], 0
        return metrics

    def _begin(self, handle: EngineHandle, failure: WorkerFailed, died_s: float) -> None:
        if handle.has_lost_its_machine:
            raise _lost(handle)
        first = self._first = self._first or _Cause(failure.reason, str(failure.log), failure.details)
        if self._max_restarts == 0:
            raise failure
        happened = failure.happened
        if self.count >= self._max_restarts:
            raise _one_too_many(first, self._max_restarts, happened)
        self.count += 1
        numbered = f"restart {self.count} of {self._max_restarts}"
        say(f"{happened}; {handle.name} is started again ({numbered}), and the others go on")
        restart = _Restart(self._start.prepare(handle), died_s, until_s=time.monotonic() + self._up_within_s)
        self._under_way[handle] = restart
        self._advance(handle, restart)

    def _retry(self, handle: EngineHandle, failure: WorkerFailed, failed: _Restart) -> None:
        if handle.has_lost_its_machine:
            raise _lost(handle)
        if not self._started:
            self._begin(handle, failure, failed.died_s)
            return
        if failed.number > len(_WAITS_S) or time.monotonic() - failed.died_s > _TRIES_WITHIN_S:
            raise _in_vain(handle, failure, failed)
        self._failed_starts += 1
        wait_s = _WAITS_S[failed.number - 1]
        numbered = f"try {failed.number + 1} of {len(_WAITS_S) + 1}"
        meanwhile = "the others go on" if self._any_has_weights else "requests wait for it"
        event = f"{handle.name} did not come back ({failure.happened})"
        say(f"{event}; it is started once more in {wait_s:g} s ({numbered}), and {meanwhile}")
        self._under_way[handle] = restart = self._next_try(handle, failed, wait_s)
        self._advance(handle, restart)

    def _next_try(self, handle: EngineHandle, failed: _Restart, wait_s: float) -> _Restart:
        """The next try: it first ends what the failed one left, if anything, and then waits."""
        now_s = time.monotonic()
        begins_at_s = now_s if failed.is_up else now_s + wait_s
        return _Restart(
            self._start.prepare(handle),
            failed.died_s,
            until_s=begins_at_s + self._up_within_s,
            number=failed.number + 1,
            begins_at_s=begins_at_s,
            goes_on_at_s=now_s + wait_s,
        )

    @property
    def _any_has_weights(self) -> bool:
        return any(handle.is_up and handle.version >= 0 for handle in self._started)

    def _advance(self, handle: EngineHandle, restart: _Restart) -> None:
        try:
            while self._have_ended(handle, restart):
                restart.is_up |= bool(restart.calls)
                restart.calls = []
                if restart.is_early:
                    self._look_after(handle, restart)
                    break
                restart.calls = list(next(restart.steps, ()))
                restart.until_s = time.monotonic() + (self._start_within_s if restart.is_up else self._up_within_s)
                if not restart.calls and not self._begins_to_load(handle, restart):
                    break
        except WorkerFailed as failure:
            self._retry(handle, failure, restart)
        except UserError as error:
            # It has started with the same arguments before, so they are not wrong.
            self._retry(handle, WorkerFailed(str(error), handle.worker.log, error), restart)
        else:
            if handle.state == "serving":
                self.note_serving(handle)

    def _begins_to_load(self, handle: EngineHandle, restart: _Restart) -> bool:
        """Go on to the loading stage, if the steps of the first have ended; return whether there are more steps."""
        if restart.stage == "load":
            restart.stage = "loaded"
        if restart.stage == "prepare":
            restart.stage = "prepared"
        if restart.stage != "prepared" or self._is_paused:
            return False
        restart.stage, restart.steps = "load", self._start.load(handle)
        return True

    def _have_ended(self, handle: EngineHandle, restart: _Restart) -> bool:
        """Whether the calls of the present step have ended; raises as soon as one has failed."""
        references = [call.reference for call in restart.calls]
        done, left = ray.wait(references, num_returns=len(references), timeout=0) if references else ([], [])
        wait([call for call in restart.calls if call.reference in done])
        if left:
            # Drop ended calls: waiting for one again would return at once, and make the loop spin.
            restart.calls = [call for call in restart.calls if call.reference in left]
            self._look_after(handle, restart)
            if time.monotonic() > restart.until_s:
                # A process sends heartbeats even while its start hangs, hence this deadline.
                raise self._too_late(handle, restart)
        return not left

    def _look_after(self, handle: EngineHandle, restart: _Restart) -> None:
        """From time to time, kill silent processes, and check that the machine still exists."""
        if restart.heartbeats.is_due:
            # Processes that are not up cannot be asked.
            end_silent([call.worker for call in restart.calls if restart.is_up], restart.heartbeats)
            if handle.has_lost_its_machine:
                raise _lost(handle)

    def _too_late(self, handle: EngineHandle, restart: _Restart) -> WorkerGone:
        if restart.is_up:
            happened = f"{handle.name} did not start within {self._start_within_s:g} s"
            advice = "see the end of its log, and raise cluster.engine_start_timeout_s if it was only slow"
        else:
            happened = f"the new process of {handle.name} was not up after {self._up_within_s:g} s"
            advice = "see to its machine (cluster.start_timeout_s)"
        return WorkerGone(happened, advice, handle.worker.log)


def _is_same(own: WorkerFailed | None, heard: WorkerFailed) -> bool:
    """Whether a process's own failure is the one reported; of a failed transfer, a peer's may be reported first."""
    of_transfer = own is not None and isinstance(own.error, TransferError) and isinstance(heard.error, TransferError)
    return own is heard or of_transfer


def _lost(handle: EngineHandle) -> WorkerGone:
    happened = f"{handle.name} is gone with the Ray node that it was on"
    return WorkerGone(happened, f"see to the machine; {GOES_ON}", handle.worker.log)


def _in_vain(handle: EngineHandle, failure: WorkerFailed, failed: _Restart) -> WorkerGone:
    """The failure of an engine that never came back; a restart of the whole run may succeed."""
    tried = f"{failed.number} tries within {time.monotonic() - failed.died_s:.0f} s"
    happened = f"{handle.name} did not come back in {tried}, the last time: {failure.happened}"
    return WorkerGone(happened, f"see to its machine and the end of its log; {GOES_ON}", handle.worker.log)


def _one_too_many(first: _Cause, max_restarts: int, last: str) -> WorkerGone:
    """The failure of a run whose engines keep dying, with the first death as the likely cause."""
    ended = f"engines died more often than cluster.max_engine_restarts={max_restarts} allows, the last time: {last}"
    failure = WorkerGone(ended, f"the first time, {first.reason}", Path(first.log))
    failure.details = first.details
    failure.may_resume = False  # new engines would die in the same way
    return failure
