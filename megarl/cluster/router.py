"""Requests over engines: each to the least loaded that serves, and on to another if that one dies."""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from threading import Event, RLock, Thread
from typing import Any

from converters.errors import UserError
from megarl.cluster.engine_handle import EngineHandle
from megarl.cluster.heartbeat import INTERVAL_S, Heartbeat
from megarl.cluster.partials import Begun, Partials
from megarl.cluster.restarts import Restarts, say
from megarl.cluster.streams import End, Stream, next_of
from megarl.cluster.worker_group import Call, Worker, wait
from megarl.data import Turn
from megarl.rollout.protocol import Engine, Progress, Request

_TICK_S = 0.2
"""How long an engine that is asked for the first time may go unheard while others are listened to."""


@dataclass(eq=False)
class Asked:
    """A request on its way: `answer` gets its samples, all of one engine."""

    number: int
    request: Request
    among: Sequence[EngineHandle]
    """Who may be asked."""
    answer: Future[list[Turn]] = field(default_factory=Future)
    handle: EngineHandle | None = None
    """Who was asked; None while it waits for somebody who can be."""
    worker: Worker | None = None
    """The process that was asked: an engine that is started anew has another."""
    begun: dict[int, Begun] = field(default_factory=dict)
    """Samples of which engines that died have told some tokens."""

    ended: dict[int, Turn] = field(default_factory=dict)
    """Samples that have ended, where others were cut."""

    @property
    def samples(self) -> int:
        """How many it asks for."""
        return self.request.sampling.samples - len(self.ended)

    @property
    def tokens(self) -> int:
        """Tokens that an engine computes before it samples, those of the prompt once."""
        return len(self.request.prompt_token_ids) + sum(len(each.token_ids) for each in self.begun.values())

    def rest(self) -> Request:
        """As much of the request as there is nothing of."""
        if not self.begun and not self.ended:
            return self.request
        left = [sample for sample in range(self.request.sampling.samples) if sample not in self.ended]
        return replace(self.request, begun={sample: self._begun(sample).token_ids.tolist() for sample in left})

    def keep(self, begun: Mapping[int, Begun]) -> int:
        """Keep what an engine that died has told of; how many tokens."""
        for sample, new in begun.items():
            self.begun[sample] = self._begun(sample) + new
        return sum(len(new.token_ids) for new in begun.values())

    def keep_cut(self, turns: Sequence[Turn]) -> None:
        """Keep an answer of which some turns were cut."""
        for sample, turn in zip(self.rest().samples, turns, strict=True):
            if turn.finish_reason == "abort":
                self.keep({sample: Begun.of(turn)})
            else:
                self.ended[sample] = self._begun(sample).ended_by(turn)

    def whole(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns of all samples, each behind what there was of it; `turns` are those of the last answer."""
        if not self.begun and not self.ended:
            return list(turns)
        asked = dict(zip(self.rest().samples, turns, strict=True))
        ended = {sample: self._begun(sample).ended_by(turn) for sample, turn in asked.items()} | self.ended
        return [ended[sample] for sample in range(self.request.sampling.samples)]

    def _begun(self, sample: int) -> Begun:
        return self.begun.get(sample, Begun.nothing())


class Router:
    """Sends requests to engines that are alike. One thread hears of all answers, deaths and restarts.

    An engine gets what it has room for, and the rest waits here for whichever has room first.

    Requests that an engine leaves unanswered when it dies are asked again, from where it told of them: their seeds are
    the same, and so are the tokens. Requests of the lowest priority go first.
    """

    def __init__(self, handles: Sequence[EngineHandle], restarts: Restarts) -> None:
        self._handles, self._restarts = handles, restarts
        # Never held while the lock of `restarts` is waited for: who holds that one may wait for answers.
        self._lock = RLock()
        self._numbers = count()
        self._asked: dict[int, Asked] = {}
        self._waiting: list[tuple[int, int, Asked]] = []
        """Requests that no engine was asked for, by priority and number: a heap."""
        self._streams: dict[Stream, EngineHandle] = {}
        self._partials: dict[Stream, Partials] = {}
        self._submitted: dict[EngineHandle, Call[None]] = {}
        self._moved = 0
        self._heartbeat = Heartbeat(handles)
        self._is_told = Event()
        self._is_closed = False
        self._listener: Thread | None = None

    def begin(self, requests: Sequence[Request], among: Sequence[EngineHandle]) -> list[Asked]:
        """Send requests, together. Their answers may fail with what an engine failed of, or refused them for."""
        with self._lock:
            begun = [Asked(next(self._numbers), request, among) for request in requests]
            self._asked |= {each.number: each for each in begun}
            self._queue(begun)
            self._send()
            self._is_told.set()
            if self._listener is None:
                self._listener = Thread(target=self._listen, name="router", daemon=True)
                self._listener.start()
        return begun

    def abandon(self, asked: Iterable[Asked]) -> None:
        """Wait no more for what is not answered: the engines end it."""
        ended: dict[EngineHandle, list[int]] = {}
        with self._lock:
            for each in asked:
                if self._asked.pop(each.number, None) is not None and each.handle is not None:
                    each.handle.load -= each.samples
                    ended.setdefault(each.handle, []).append(each.number)
            self._send()
        for handle, numbers in ended.items():
            if handle.is_up:
                handle.begin(Engine.abort, numbers)

    def least_loaded(self, among: Sequence[EngineHandle], samples: int) -> EngineHandle:
        """The engine that is asked next, with so many samples more to give from now on.

        It depends on the loads alone, so that engines that were idle get the same requests whenever they are asked.
        """
        with self._lock:
            handle = min(self._able(among) or among, key=lambda each: each.load)
            handle.load += samples
            return handle

    def sleep(self, handles: Sequence[EngineHandle]) -> None:
        """Ask these for nothing more until `wake_up`; returns when they have taken in all that they were asked for."""
        with self._lock:
            for handle in handles:
                handle.is_asleep = True
            submitted = [self._submitted.pop(handle) for handle in handles if handle in self._submitted]
        wait(submitted)

    def wake_up(self, handles: Sequence[EngineHandle]) -> None:
        """Ask these again."""
        with self._lock:
            for handle in handles:
                handle.is_asleep = False
            self._send()

    def take_moved(self) -> int:
        """Tokens that an engine had computed and lost, to be computed again, since they were taken last."""
        with self._lock:
            moved, self._moved = self._moved, 0
            return moved

    def close(self) -> None:
        """Hear of nothing more, before the engines are ended."""
        with self._lock:
            self._is_closed = True
        self._is_told.set()
        if self._listener is not None:
            self._listener.join()

    def _able(self, among: Sequence[EngineHandle]) -> Sequence[EngineHandle]:
        """The engines that may be asked."""
        among = [handle for handle in among if not handle.is_asleep]
        if serving := [handle for handle in among if handle.state == "serving"]:
            return serving
        # Where none serves, requests wait for the end of an update, or else for an engine that is started anew.
        restarting = [handle for handle in among if self._restarts.awaits(handle)]
        if (up := [handle for handle in among if handle.is_up and handle not in restarting]) or restarting:
            return up
        # A failure says what it was.
        return among

    def _queue(self, asked: Iterable[Asked]) -> None:
        for each in asked:
            heappush(self._waiting, (each.request.priority, each.number, each))

    def _send(self) -> None:
        """Ask whoever can be asked and has room."""
        shares: dict[EngineHandle, dict[int, Request]] = {}
        left = []
        while self._waiting and any(handle.has_room for handle in self._handles):
            entry = heappop(self._waiting)
            each = entry[-1]
            if each.number not in self._asked:
                continue  # nobody waits for it any more
            able = self._able(each.among)
            if able and not all(handle.is_full for handle in able):
                each.handle = self.least_loaded(each.among, each.samples)
                each.worker = each.handle.worker
                shares.setdefault(each.handle, {})[each.number] = each.rest()
            else:
                left.append(entry)
        for entry in left:
            heappush(self._waiting, entry)
        for handle, requests in shares.items():
            if not any(stream.worker is handle.worker for stream in self._streams):
                stream = handle.stream(Engine.events)
                self._streams[stream], self._partials[stream] = handle, Partials()
            self._submitted[handle] = handle.begin(Engine.submit, requests)

    def _listen(self) -> None:
        try:
            self._hear_all()
        except BaseException as failure:
            # Nobody would hear of an answer any more.
            self._fail(list(self._asked.values()), RuntimeError(f"the router failed: {failure!r}"))
            raise

    def _hear_all(self) -> None:
        next_look_s = 0.0
        while not self._is_closed:
            found = None
            if self._streams:
                found = next_of(list(self._streams), self._restarts.calls, _TICK_S)
            else:
                self._is_told.wait(_TICK_S if self._asked else None)
                self._is_told.clear()
            if self._is_closed:
                break
            if found is not None:
                self._hear(*found)
            if found is None or time.monotonic() > next_look_s:
                self._look_after()
                next_look_s = time.monotonic() + INTERVAL_S

    def _hear(self, stream: Stream, result: Any) -> None:
        if isinstance(result, End):
            self._lose(stream, result.failure)
            return
        if isinstance(result, Progress):
            self._keep(self._partials[stream], result)
            return
        answer = result.answer
        is_cut = not isinstance(answer, UserError) and any(turn.finish_reason == "abort" for turn in answer)
        with self._lock:
            asked = self._asked.pop(result.number, None)
            if asked is None or asked.handle is None:  # nobody waits for it any more
                return
            asked.handle.load -= asked.samples
            if is_cut:
                self._ask_on(asked, answer)
            self._send()
        if isinstance(answer, UserError):
            asked.answer.set_exception(answer)
        elif not is_cut:
            asked.answer.set_result(asked.whole(answer))

    def _ask_on(self, asked: Asked, turns: Sequence[Turn]) -> None:
        """Ask for the rest of what an engine has cut; under another number, since it told of tokens under this one."""
        asked.keep_cut(turns)
        self._moved += asked.tokens
        asked.number, asked.handle, asked.worker = next(self._numbers), None, None
        self._asked[asked.number] = asked
        self._queue([asked])

    def _keep(self, partials: Partials, told: Progress) -> None:
        partials.add(told)
        if partials.are_many:
            with self._lock:
                unanswered = list(self._asked)
            partials.keep(unanswered)

    def _lose(self, stream: Stream, failure: Exception | None) -> None:
        """Nothing more comes from an engine; its requests go elsewhere if it has died, and fail if it has not."""
        with self._lock:
            handle, partials = self._streams.pop(stream), self._partials.pop(stream)
            left = [each for each in self._asked.values() if each.worker is stream.worker]
            # Its process is another one already if this death was heard of before.
            is_dead = handle.state == "down" or stream.worker is not handle.worker
            told = partials.of([each.number for each in left])
            kept = sum(each.keep(told.get(each.number, {})) for each in left)
            self._moved += sum(each.tokens for each in left)
            for each in left:
                handle.load -= each.samples
                each.handle = each.worker = None
            self._queue(left)
        if failure is not None and not is_dead:
            self._fail(left, failure)
            return
        if left:
            say(f"{handle.name} had not answered {len(left)} requests: they go on behind the {kept} tokens there are")
        self._look_after()

    def _look_after(self) -> None:
        """Begin to start anew who has died, go on with who is started, and send what waits to who serves."""
        with self._lock:
            busy = {each.handle for each in self._asked.values() if each.handle is not None}
        try:
            self._heartbeat.dead(busy)
            for handle in self._handles:
                if handle.state == "down":
                    self._restarts.begin(handle)
            self._restarts.go_on()
        except Exception as failure:  # noqa: BLE001 - it is raised where an answer is waited for
            with self._lock:
                waiting = [each for each in self._asked.values() if each.handle is None]
            self._fail(waiting, failure)
            return
        with self._lock:
            self._send()

    def _fail(self, asked: Sequence[Asked], failure: Exception) -> None:
        with self._lock:
            failed = [each for each in asked if self._asked.pop(each.number, None) is not None]
        for each in failed:
            each.answer.set_exception(failure)
