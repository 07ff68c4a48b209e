"""Asks awaited processes for a heartbeat at regular intervals."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

import ray


class Watched(Hashable, Protocol):
    """Something that is watched, with a limit of silence."""

    silence_s: float


class Question(Protocol):
    """A heartbeat call in flight."""

    @property
    def reference(self) -> ray.ObjectRef:
        """Ray's reference to its result."""


W = TypeVar("W", bound=Watched)
Q = TypeVar("Q", bound=Question)


class Looked(NamedTuple, Generic[W, Q]):
    """The questions that ended since the last look, and those that were silent for too long."""

    ended: list[Q]
    silent: list[W]


class _Open(NamedTuple, Generic[Q]):
    """An unanswered question, and for how long it has been so."""

    question: Q
    silent_s: float


class Heartbeats(Generic[W, Q]):
    """Asks each watched object one question at a time, every `interval_s`, and measures its silence."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._looked_s = time.monotonic()
        self._open: dict[W, _Open[Q]] = {}

    @property
    def is_due(self) -> bool:
        """Whether the next look is due."""
        return time.monotonic() >= self._looked_s + self._interval_s

    def look(self, questions: Mapping[W, Callable[[], Q]]) -> Looked[W, Q]:
        """Collect answers, and ask all those that have no open question.

        The silence of objects that are not in `questions` is forgotten.
        """
        now_s = time.monotonic()
        # Count at most twice the interval: while this process was busy or suspended itself, it could not observe
        # silence.
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
