"""Requests of which a test knows how far they are: the engine has taken them in, or has begun all their samples."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from megarl.data import Turn
from megarl.rollout.protocol import EngineDiedError, Event, Progress, Request, RequestEnded, Sampler

TIMEOUT_S = 250


@dataclass(eq=False)
class _Asked:
    request: Request
    samples: set[int]
    """Samples of which nothing was heard yet."""
    answer: Future[list[list[Turn]]] = field(default_factory=Future)
    has_begun: threading.Event = field(default_factory=threading.Event)


class AskedEngine:
    """An engine, and a thread that hears what becomes of the requests; nobody else may listen meanwhile."""

    def __init__(self, engine: Sampler, threads: Executor) -> None:
        self._engine, self._threads = engine, threads
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count()

    def ask(self, request: Request) -> Future[list[list[Turn]]]:
        """The answer that is to come, as of `generate`; the engine has taken the request in."""
        return self.ask_together([request])[0]

    def ask_together(self, requests: Sequence[Request]) -> list[Future[list[list[Turn]]]]:
        """The same for each of several requests, which enter the engine together."""
        return [asked.answer for asked in self._submit(requests)]

    def begin(self, request: Request) -> Future[list[list[Turn]]]:
        """The answer that is to come; the engine has sampled a token of each sample, at least."""
        (asked,) = self._submit([request])
        assert asked.has_begun.wait(TIMEOUT_S)
        return asked.answer

    def _submit(self, requests: Sequence[Request]) -> list[_Asked]:
        asked = {next(self._numbers): _Asked(request, set(request.samples)) for request in requests}
        with self._lock:
            is_heard = bool(self._asked)
            self._asked |= asked
        self._engine.submit({number: each.request for number, each in asked.items()})
        if not is_heard:
            self._threads.submit(self._hear)
        return list(asked.values())

    def _hear(self) -> None:
        """Until nothing is left to be heard of."""
        try:
            for events in self._engine.events():
                with self._lock:
                    for event in events:
                        self._note(event)
                    if not self._asked:
                        return
        except EngineDiedError as error:
            with self._lock:
                for asked in self._asked.values():
                    asked.answer.set_exception(error)
                self._asked.clear()

    def _note(self, event: Event) -> None:
        if isinstance(event, Progress):
            for number, sample in zip(event.numbers.tolist(), event.samples.tolist(), strict=True):
                asked = self._asked[number]
                asked.samples.discard(sample)
                if not asked.samples:
                    asked.has_begun.set()
        if not isinstance(event, RequestEnded):
            return
        asked = self._asked.pop(event.number)
        if isinstance(event.answer, list):
            asked.answer.set_result([event.answer])
        else:
            asked.answer.set_exception(event.answer)
        asked.has_begun.set()
