"""Distributes requests over engines: each goes to a serving engine with room, and to another if that one dies."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from converters.errors import UserError
from megarl.cluster.engines.engine_handle import EngineHandle, is_death, wait_for_living
from megarl.cluster.engines.pending_request import PartialTurns, PendingRequest
from megarl.cluster.engines.progress_log import ProgressLog
from megarl.cluster.workers.calls import ended_calls
from megarl.cluster.workers.streams import Stream
from megarl.cluster.workers.worker import Call, Failed, WorkerFailed
from megarl.data import Turn
from megarl.process.logs import say
from megarl.rollout.conversations import Conversations
from megarl.rollout.protocol import Engine, Event, Progress, Request, RequestEnded, SamplesEnded


class _Submitted(NamedTuple):
    """A submit call in flight, with the numbers of its requests; without numbers, an abort.

    Calls may overtake each other.
    """

    handle: EngineHandle
    call: Call[None]
    numbers: Sequence[int]


class RequestQueue:
    """All unanswered requests; usable from any thread.

    An engine gets as many as it has room for. The rest wait here for the first engine with room, in ascending priority.

    Unanswered requests of an engine that dies continue on another, after the tokens that it reported. They keep their
    seeds, and so give the same tokens.
    """

    def __init__(self, handles: Sequence[EngineHandle], awaits: Callable[[EngineHandle], bool]) -> None:
        """`awaits(handle)` says whether an engine is being restarted and has no weights yet."""
        self._handles, self._awaits = handles, awaits
        # Never hold it while waiting for the lock of restarts, whose holder may be waiting for answers.
        self._lock = threading.RLock()
        self._numbers = count()
        self._pending: dict[int, PendingRequest] = {}
        self._waiting: list[tuple[int, int, PendingRequest]] = []
        """Queued requests: a heap by priority and number."""
        self._conversations = Conversations[EngineHandle]()
        self._streams: dict[Stream, EngineHandle] = {}
        self._progress: dict[Stream, ProgressLog] = {}
        self._submitted: list[_Submitted] = []
        self._moved = 0
        self._failure: Exception | None = None
        """Why the router has stopped."""

    @property
    def streams(self) -> list[Stream]:
        """The streams of the engines' events."""
        return list(self._streams)

    @property
    def unanswered(self) -> int:
        """The number of unanswered requests."""
        return len(self._pending)

    def begin(
        self, requests: Sequence[Request], among: Sequence[EngineHandle], partial_turns: Sequence[PartialTurns] = ()
    ) -> list[PendingRequest]:
        """Queue requests together. An answer fails with the engine's failure or refusal.

        With `partial_turns`, they continue after what was already sampled of each.
        """
        begun = [PendingRequest(next(self._numbers), request, among) for request in requests]
        for each, turns in zip(begun, partial_turns, strict=False):
            each.keep_turns(turns)
        left = [each for each in begun if each.left]
        with self._lock:
            self._pending |= {each.number: each for each in left}
            self._moved += sum(each.tokens for each in left if each.begun)
            self._queue(left)
            self._dispatch()
            failure = self._failure
        if failure is not None:
            self._fail(left, failure)
        for each in begun:
            if not each.left:
                each.answer.set_result(each.whole())
        return begun

    def partial_turns(self, pending: Sequence[PendingRequest]) -> list[PartialTurns]:
        """A consistent snapshot of the turns sampled so far for each of these requests."""
        with self._lock:
            copies = [each.copy() for each in pending]
            partials = [each.copy() for each in self._progress.values()]
        numbers = [each.number for each in copies]
        told = {number: begun for each in partials for number, begun in each.of(numbers).items()}
        for each in copies:
            each.keep(told.get(each.number, {}))
        return [each.partial_turns() for each in copies]

    def abandon(self, pending: Iterable[PendingRequest]) -> None:
        """Drop those of the requests that are unanswered; their engines abort them."""
        ended: dict[EngineHandle, list[int]] = {}
        with self._lock:
            for each in pending:
                if self._pending.pop(each.number, None) is not None and each.handle is not None:
                    ended.setdefault(each.handle, []).append(each.number)
                    self._unassign(each)
            self._dispatch()
            for handle in (each for each in ended if each.is_up):
                self._submitted.append(_Submitted(handle, handle.begin(Engine.abort, ended[handle]), ()))

    @contextmanager
    def asking(self, request: Request, among: Sequence[EngineHandle]) -> Iterator[EngineHandle]:
        """Choose an engine for a request that the caller sends itself; within the context it is part of its load."""
        with self._lock:
            pending = PendingRequest(next(self._numbers), request, among)
            able = self._candidates(among) or among
            handle = self._assign(pending, self._with_room(able) or able)
        try:
            yield handle
        finally:
            with self._lock:
                self._unassign(pending)

    def sleep(self, handles: Sequence[EngineHandle]) -> None:
        """Send nothing to these engines until `wake_up`; returns when they have received everything sent before."""
        with self._lock:
            for handle in handles:
                handle.is_asleep = True
            # Aborts are not waited for: they may arrive later, or fail.
            submitted = [each.call for each in self._submitted if each.handle in handles and each.numbers]
        # Requests of a dead engine go elsewhere.
        wait_for_living(submitted)

    def wake_up(self, handles: Sequence[EngineHandle]) -> None:
        """Resume sending to these engines."""
        with self._lock:
            for handle in handles:
                handle.is_asleep = False
        self.dispatch()

    def dispatch(self) -> None:
        """Send queued requests to engines that have room."""
        with self._lock:
            self._dispatch()

    def take_moved(self) -> int:
        """Return the tokens computed and lost by engines, to be recomputed, since the last call."""
        with self._lock:
            moved, self._moved = self._moved, 0
            return moved

    def take_idle_s(self) -> list[float]:
        """Return the seconds that each engine had nothing to sample since the last call."""
        with self._lock:
            return [handle.take_idle_s() for handle in self._handles]

    def receive(self, stream: Stream, events: Sequence[Event]) -> None:
        """Handle the events of an engine's stream."""
        ended = []
        for event in events:
            if isinstance(event, Progress):
                self._keep(self._progress[stream], event)
            elif isinstance(event, SamplesEnded):
                self._end_samples(event)
            elif (pending := self._end(event)) is not None:
                ended.append((pending, event.answer))
        # Progress frees no room, and every engine reports it many times a second.
        if not all(isinstance(event, Progress) for event in events):
            self.dispatch()
        # Set results last, when engines already have new work: callbacks are slow.
        for pending, answer in ended:
            if isinstance(answer, UserError):
                pending.answer.set_exception(answer)
            else:
                pending.answer.set_result(pending.whole())

    def end_stream(self, stream: Stream, failure: Exception | None) -> bool:
        """Handle the end of an engine's stream: its requests go elsewhere if it has died, and fail otherwise.

        Returns whether the engine has died.
        """
        with self._lock:
            handle, partials = self._streams.pop(stream), self._progress.pop(stream)
            left = [each for each in self._pending.values() if each.worker is stream.worker]
            # If the death is already known, another process may have taken its place.
            is_dead = handle.state == "down" or stream.worker is not handle.worker
            if failure is None and not is_dead:
                self._listen(handle, partials)
                return False
            told = partials.of([each.number for each in left])
            kept = sum(each.keep(told.get(each.number, {})) for each in left)
            self._moved += sum(each.tokens for each in left)
            for each in left:
                self._unassign(each)
            self._queue(left)
        if failure is not None and not is_dead:
            self._fail(left, failure)
            return False
        if left:
            say(f"{handle.name} had not answered {len(left)} requests: they go on behind the {kept} tokens there are")
        return True

    def check_submitted(self) -> None:
        """Fail the requests whose submit call has failed."""
        # An engine's death is handled when its stream ends.
        with self._lock:
            heard = dict(ended_calls([each.call for each in self._submitted]))
            ended = [each for each in self._submitted if each.call in heard]
            self._submitted = [each for each in self._submitted if each.call not in heard]
        for each in ended:
            answer = heard[each.call]
            if isinstance(answer, Failed) and not (
                isinstance(answer.failure, WorkerFailed) and is_death(answer.failure)
            ):
                self._refuse(each, answer.failure)

    def fail_waiting(self, failure: Exception) -> None:
        """Fail the requests that are queued."""
        with self._lock:
            waiting = [each for each in self._pending.values() if each.handle is None]
        self._fail(waiting, failure)

    def fail_all(self, failure: Exception) -> None:
        """Fail all present and future requests: nothing receives answers any more."""
        with self._lock:
            self._failure = failure
            pending = list(self._pending.values())
        self._fail(pending, failure)

    def _candidates(self, among: Sequence[EngineHandle]) -> Sequence[EngineHandle]:
        """The engines that a request may go to."""
        among = [handle for handle in among if not handle.is_asleep]
        if serving := [handle for handle in among if handle.state == "serving"]:
            return serving
        # If none serves, wait for the end of a refit or for an engine being restarted.
        restarting = [handle for handle in among if self._awaits(handle)]
        if (up := [handle for handle in among if handle.is_up and handle not in restarting]) or restarting:
            return up
        # Try anyway: the failure of the call will say what is wrong.
        return among

    def _with_room(self, handles: Sequence[EngineHandle]) -> Sequence[EngineHandle]:
        return [handle for handle in handles if not handle.is_full]

    def _assign(self, pending: PendingRequest, among: Sequence[EngineHandle]) -> EngineHandle:
        """Choose an engine for a request and add it to the engine's load."""
        handle = self._conversations.choose(pending.request.conversation, among)
        self._conversations.begin(pending.request.conversation, handle)
        pending.handle, pending.worker, pending.load = handle, handle.worker, pending.samples
        handle.load += pending.load
        return handle

    def _unassign(self, pending: PendingRequest) -> None:
        """Remove a request from its engine's load, if it has an engine."""
        if pending.handle is not None:
            self._conversations.end(pending.request.conversation, pending.handle)
            pending.handle.load -= pending.load
        pending.handle = pending.worker = None

    def _queue(self, pending: Iterable[PendingRequest]) -> None:
        for each in pending:
            heappush(self._waiting, (each.request.priority, each.number, each))

    def _dispatch(self) -> None:
        """Send queued requests to engines that serve and have room."""
        shares: dict[EngineHandle, dict[int, Request]] = {}
        left = []
        # Stop as soon as no engine has room, so that calls do not scan the whole queue.
        while self._waiting and any(handle.has_room for handle in self._candidates(self._handles)):
            entry = heappop(self._waiting)
            each = entry[-1]
            if each.number not in self._pending:
                continue  # abandoned
            if with_room := self._with_room(self._candidates(each.among)):
                shares.setdefault(self._assign(each, with_room), {})[each.number] = each.rest()
            else:
                left.append(entry)
        for entry in left:
            heappush(self._waiting, entry)
        for handle, requests in shares.items():
            if not any(stream.worker is handle.worker for stream in self._streams):
                self._listen(handle, ProgressLog())
            self._submitted.append(_Submitted(handle, handle.begin(Engine.submit, requests), list(requests)))

    def _listen(self, handle: EngineHandle, partials: ProgressLog) -> None:
        stream = handle.stream(Engine.events, len(self._handles))
        self._streams[stream], self._progress[stream] = handle, partials

    def _refuse(self, submitted: _Submitted, failure: Exception) -> None:
        """Fail the requests that an engine refused or, if an abort failed, all requests of the engine."""
        with self._lock:
            numbers = submitted.numbers or list(self._pending)
            found = [self._pending[number] for number in numbers if number in self._pending]
            # If the engine has died since, they may be on another engine.
            refused = [each for each in found if each.worker is submitted.call.worker]
            for each in refused:
                self._unassign(each)
        if not submitted.numbers:
            say(f"{submitted.handle.name} could not end requests that nobody waits for: {failure}")
        self._fail(refused, failure)

    def _end_samples(self, event: SamplesEnded) -> None:
        """Remove these samples from the load of their engines."""
        with self._lock:
            for pending in (self._pending[number] for number in event.numbers if number in self._pending):
                if pending.handle is not None:
                    pending.load -= 1
                    pending.handle.load -= 1

    def _end(self, event: RequestEnded) -> PendingRequest | None:
        """Remove a request from its engine's load and return it.

        Returns None if it was abandoned, or continues after an abort.
        """
        answer = event.answer
        with self._lock:
            pending = self._pending.pop(event.number, None)
            if pending is None or pending.handle is None:
                return None
            self._unassign(pending)
            if not isinstance(answer, UserError):
                pending.keep_answer(answer)
                if pending.left:
                    self._ask_on(pending, answer)
                    return None
        return pending

    def _ask_on(self, pending: PendingRequest, turns: Sequence[Turn]) -> None:
        """Queue the rest of an aborted request, under a new number, since progress was reported under the old one."""
        if any(len(turn.token_ids) for turn in turns):
            self._moved += pending.tokens
        pending.number = next(self._numbers)
        self._pending[pending.number] = pending
        self._queue([pending])

    def _keep(self, partials: ProgressLog, told: Progress) -> None:
        partials.add(told)
        if partials.are_many:
            # Another thread may be copying them.
            with self._lock:
                partials.keep(self._pending)

    def _fail(self, pending: Sequence[PendingRequest], failure: Exception) -> None:
        with self._lock:
            failed = [each for each in pending if self._pending.pop(each.number, None) is not None]
        for each in failed:
            each.answer.set_exception(failure)
