"""Processes that are waited for, asked now and then for a heartbeat."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

import ray


class Watched(Hashable, Protocol):
    """Somebody who may be silent for so long."""

    silence_s: float


class Question(Protocol):
    """A call that was begun."""

    @property
    def reference(self) -> ray.ObjectRef:
        """The name of its end, as Ray has it."""


W = TypeVar("W", bound=Watched)
Q = TypeVar("Q", bound=Question)


class Looked(NamedTuple, Generic[W, Q]):
    """Questions that have ended since the last time, and those who were silent for as long as they may be."""

    ended: list[Q]
    silent: list[W]


class _Open(NamedTuple, Generic[Q]):
    """A question, and for how long it has had no answer."""

    question: Q
    silent_s: float


class Heartbeats(Generic[W, Q]):
    """Asks one thing of each at a time, every `interval_s`, and counts for how long they do not answer."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._looked_s = time.monotonic()
        self._open: dict[W, _Open[Q]] = {}

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() >= self._looked_s + self._interval_s

    def look(self, questions: Mapping[W, Callable[[], Q]]) -> Looked[W, Q]:
        """Take the answers of these, and begin to ask those of whom nothing is asked.

        The silence of one that is not among them is forgotten.
        """
        now_s = time.monotonic()
        # Whoever does not listen, because it does something else or was stopped itself, has not heard of a silence.
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * self._interval_s), now_s
        references = [each.question.reference for watched, each in self._open.items() if watched in questions]
        done = set(ray.wait(references, num_returns=len(references), timeout=0)[0]) if references else set()
        ended, still_open = list[Q](), dict[W, _Open[Q]]()
        for watched, begin in questions.items():
            before = self._open.get(watched)
            if before is not None and before.question.reference in done:
                ended.append(before.question)
                before = None
            still_open[watched] = (
                _Open(begin(), 0.0) if before is None else _Open(before.question, before.silent_s + passed_s)
            )
        self._open = still_open
        return Looked(ended, [watched for watched, each in still_open.items() if each.silent_s >= watched.silence_s])
