"""An engine in the calling process, owned by one thread that runs requests, pauses and updates."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from converters.errors import UserError
from megarl.data import Turn
from megarl.resharding.loader.buckets import Bucket
from megarl.rollout.progress_reporter import ProgressReporter
from megarl.rollout.protocol import (
    EngineDiedError,
    EngineMemory,
    Event,
    KeysAndValues,
    Load,
    PauseMode,
    Progress,
    Request,
    RequestEnded,
    SamplesEnded,
    UpdateError,
)
from megarl.rollout.request_in_flight import Answer, Listener, SampleInFlight, tokens_of
from megarl.rollout.text import Texts
from megarl.rollout.update import WeightUpdate
from megarl.rollout.worker_memory import require

R = TypeVar("R")
P = ParamSpec("P")
E = TypeVar("E", bound="OwnedEngine")

_EVENTS_PER_BATCH = 16
"""A limit: sending a batch costs as much as a few short answers, and larger batches would wait for the texts of long
ones.
"""
_BATCHES_PER_CALL = 10_000
"""A limit, since Ray (2.60) keeps some 200 bytes per batch on both sides until the call ends."""


def by_owner(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Decorate a method to run in the engine's owner thread, after all earlier calls.

    Raises EngineDiedError if the engine has died.
    """

    @functools.wraps(method)
    def call(self: E, *arguments: P.args, **options: P.kwargs) -> R:
        def task() -> R:
            self._check_alive()
            try:
                return method(self, *arguments, **options)
            except EngineDiedError as error:
                self._die(error)
                raise

        return self._owner.submit(task).result()

    return call


class OwnedEngine(ABC):
    """The part of `megarl.rollout.protocol.Engine` that all engines share.

    One thread owns the underlying engine: every outside call is a task in its queue, so calls never overlap and need no
    lock.
    """

    title: ClassVar[str]
    """Name of the engine in messages."""

    def __init__(self, model_path: Path | str, engine_args: Mapping[str, Any]) -> None:
        self._model_path = Path(model_path)
        self._texts = Texts(self._model_path)
        self._engine_args = dict(engine_args)
        self._owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self.title)
        self._version = -1
        self._update: WeightUpdate | None = None
        self._away: frozenset[EngineMemory] = frozenset()
        self._paused = False
        self._death: BaseException | None = None
        self._outbox = SimpleQueue[tuple[int, Request, Future[list[Turn]]] | SamplesEnded | Progress | None]()
        self._reporter = ProgressReporter()

    def generate(self, requests: Sequence[Request]) -> list[list[Turn]]:
        """See `Sampler.generate`."""
        return [future.result() for future in self._add(requests)]

    def submit(self, requests: Mapping[int, Request]) -> None:
        """See `Sampler.submit`."""
        try:
            added = self._add(list(requests.values()))
        except Exception as error:  # noqa: BLE001 - `events` says it
            added = [_failed(error)] * len(requests)
        for (number, request), future in zip(requests.items(), added, strict=True):
            self._reporter.begin(number, future)
            future.add_done_callback(functools.partial(self._tell, number, request))

    def events(self, engines: int = 1) -> Iterator[list[Event]]:
        """See `Sampler.events`."""
        self._reporter.engines = engines
        for _ in range(_BATCHES_PER_CALL):
            told = [self._outbox.get()]
            while len(told) < _EVENTS_PER_BATCH and not self._outbox.empty():
                told.append(self._outbox.get())
            together: list[Event] = []
            for each in (each for each in told if each is not None):
                try:
                    together.append(self._event(each))
                except Exception:
                    yield together
                    raise
            if together:
                yield together
            if told[-1] is None:
                return

    @by_owner
    def abort(self, numbers: Collection[int]) -> None:
        """See `Sampler.abort`."""
        if answers := self._reporter.answers(numbers):
            self._pause_stepping()
            try:
                self._abort_some(answers)
            finally:
                self._resume_stepping()

    @by_owner
    def load(self) -> Load | None:
        """See `Sampler.load`. None, unless a subclass sees the steps."""
        return None

    def generate_stream(self, request: Request) -> Iterator[list[int]]:
        """See `Sampler.generate_stream`."""
        if request.sampling.samples != 1:
            raise UserError(f"a stream of {request.sampling.samples} samples: ask for one")
        pieces = SimpleQueue[list[int] | None]()
        (future,) = self._add([request], pieces.put)
        future.add_done_callback(lambda _: pieces.put(None))
        while (piece := pieces.get()) is not None:  # not `yield from`, as Ray calls `send` on this generator
            yield piece
        future.result()

    @by_owner
    def pause(self, mode: PauseMode) -> None:
        """See `Sampler.pause`."""
        self._pause_stepping()
        self._paused = True
        if mode == "abort":
            self._abort()

    @by_owner
    def resume(self) -> None:
        """See `Sampler.resume`."""
        self._paused = False
        self._resume_stepping()

    @by_owner
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    def close(self) -> None:
        """See `Sampler.close`."""
        self._owner.submit(self._end).result()
        self._outbox.put(None)

    @by_owner
    def begin_update(self, version: int, names: Sequence[str]) -> None:
        """See `WeightTarget.begin_update`."""
        if self._update is not None and not self._update.failed and self._update.version != version:
            raise UpdateError(f"update {version} cannot begin before {self._update.version} was committed")
        if version <= self._version:
            raise UpdateError(f"update {version} is not newer than the weights of version {self._version}")
        if self._update is not None:
            self._abandon_update()
        self._fence()
        self._update = WeightUpdate(version, names)

    @by_owner
    def write(self, bucket: Bucket) -> None:
        """See `WeightTarget.write`."""
        require(self._away, "weights")
        update = self._update_under_way("write")
        update.failed = True
        if not update.loads_by_name:
            self._begin_loading()
            update.loads_by_name = True
        update.accept(entry.name for entry in bucket.entries)
        self._load_weights(bucket)
        update.failed = False

    @by_owner
    def receive(self, version: int) -> None:
        """See `WeightTarget.receive`."""
        require(self._away, "weights")
        update = self._update_under_way("receive")
        update.check_version(version)
        update.failed = True
        update.accept_all()
        self._receive(version)
        update.failed = False

    @by_owner
    def commit_update(self, version: int, kv: KeysAndValues = "recompute") -> int:
        """See `WeightTarget.commit_update`."""
        update = self._update_under_way("commit")
        update.check_version(version)
        update.failed = True
        update.check_complete()
        if update.loads_by_name:
            self._finish_loading()
        self._finish_update(version)
        if kv == "keep":
            self._keep_kv_cache(version)
        else:
            self._reset_kv_cache()
        self._version = version
        self._update = None
        self._resume_stepping()
        return 0 if kv == "keep" else tokens_of(self._samples())

    def start_profiler(self) -> None:  # noqa: B027 - most compute in this process
        """See `Profiled.start_profiler`."""

    def stop_profiler(self, most_events: int, since_us: float) -> Mapping[str, bytes]:  # noqa: ARG002 - as above
        """See `Profiled.stop_profiler`."""
        return {}

    # The methods below, too, run in the owner thread.

    @abstractmethod
    def _accept(self, requests: Sequence[Request], listener: Listener | None) -> list[Answer]:
        """Accept requests; each future gets the samples of one. A `listener` is called with new tokens as they come."""

    def _samples(self) -> Iterable[SampleInFlight]:
        """The samples in flight; none if the engine cannot continue samples that another has begun."""
        return ()

    @abstractmethod
    def _abort(self) -> None:
        """End all requests with the tokens that they have."""

    @abstractmethod
    def _abort_some(self, answers: Collection[Future[list[Turn]]]) -> None:
        """End the requests of these answers, with the tokens that they have."""

    @abstractmethod
    def _fail(self, error: EngineDiedError) -> None:
        """End all requests with an error."""

    @abstractmethod
    def _reset_kv_cache(self) -> None:
        """Drop the prefix cache, and recompute the KV cache of requests in flight; called between steps."""

    def _keep_kv_cache(self, version: int) -> None:
        """Let requests in flight keep their KV cache; later requests must not share it."""
        raise UpdateError(
            f"the {self.title} engine keeps no keys and values when weights change: commit {version} without"
        )

    @abstractmethod
    def _load_weights(self, bucket: Bucket) -> None:
        """Load the weights of a bucket by name."""

    @abstractmethod
    def _receive(self, version: int) -> None:
        """Receive the weights of a direct transfer."""

    @abstractmethod
    def _close(self) -> None:
        """Free everything that was started; requests in flight end with an error."""

    @abstractmethod
    def _pause_stepping(self) -> None:
        """Keep further steps from beginning."""

    def _fence(self) -> None:
        """Keep further steps from beginning, so that weights can be written."""
        self._pause_stepping()

    @abstractmethod
    def _resume_stepping(self) -> None:
        """Let steps begin again, unless something else prevents it."""

    def _abandon_update(self) -> None:  # noqa: B027 - most keep nothing of it
        """Discard an unfinished update."""

    def _begin_loading(self) -> None:  # noqa: B027 - as above
        """Prepare for weights by name."""

    def _finish_loading(self) -> None:  # noqa: B027 - as above
        """Recompute everything derived from weights, after all have come by name."""

    def _finish_update(self, version: int) -> None:  # noqa: B027 - as above
        """Accept the weights as those of `version`."""

    def _tell(self, number: int, request: Request, done: Future[list[Turn]]) -> None:
        self._outbox.put((number, request, done))

    def _event(self, told: tuple[int, Request, Future[list[Turn]]] | SamplesEnded | Progress) -> Event:
        if isinstance(told, SamplesEnded | Progress):
            return told
        number, request, future = told
        if isinstance(refusal := future.exception(), UserError):
            return RequestEnded(number, refusal)
        return RequestEnded(number, self._texts.added(future.result(), request))

    def _end(self) -> None:
        self._death = self._death or RuntimeError("it was closed")
        self._close()

    def _closed(self) -> EngineDiedError:
        return EngineDiedError(f"the {self.title} engine was closed")

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDiedError(f"the {self.title} engine has died: {self._death}") from self._death

    @by_owner
    def _add(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Answer]:
        if self._version < 0 and self._update is None:
            raise UpdateError("the engine has dummy weights: commit a weight update before the first generation")
        require(self._away, "weights", "kv_cache")
        return self._accept(requests, listener)

    def _report_progress(self) -> None:
        """Report new tokens and ended samples, if a report is due; called in the thread that has them."""
        if self._reporter.is_due():
            for news in self._reporter.of(self._samples()):
                self._outbox.put(news)

    def _die(self, error: BaseException) -> None:
        self._death = error
        died = EngineDiedError(f"the {self.title} engine died: {error}")
        died.__cause__ = error
        self._fail(died)

    def _update_under_way(self, action: str) -> WeightUpdate:
        if self._update is None:
            raise UpdateError(f"{action} without begin_update")
        if self._update.failed:
            raise UpdateError(f"{action} after update {self._update.version} failed: begin it again")
        return self._update


def _failed(error: Exception) -> Answer:
    future = Answer()
    future.set_exception(error)
    return future
