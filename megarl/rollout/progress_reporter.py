"""Reports tokens and ended samples of unfinished requests, so that the caller has them if the engine dies."""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future

import numpy as np

from megarl.data import Turn
from megarl.rollout.protocol import Progress, SamplesEnded
from megarl.rollout.request_in_flight import Answer, SampleInFlight

TOKENS = 64
"""Steps between reports, and so the most tokens of a sample in one."""
SECONDS = 0.05
"""Most seconds between reports."""
OFTEN = 10
"""Above this many engines, each reports less often: one thread reads all reports, at 0.3 ms each."""
AT_ONCE = 8192
"""Tokens per report: arrays of more than three times as many would stay in the object store of the engine's machine."""


class ProgressReporter:
    """Makes the reports of submitted requests, `Progress` and `SamplesEnded`, every `TOKENS` steps or `SECONDS`."""

    def __init__(self) -> None:
        self.engines = 1
        """The number of engines that report to the same reader."""
        self._numbers: dict[Future[list[Turn]], int] = {}
        self._ends = deque[int]()
        """The request of each ended sample, batched because a report of one costs as much as a report of many."""
        self._steps = 0
        self._next_s = 0.0

    @property
    def _rarity(self) -> float:
        return max(1.0, self.engines / OFTEN)

    def begin(self, number: int, answer: Answer) -> None:
        """Report on a request from now on, until it is answered."""
        self._numbers[answer] = number
        for end in answer.ends:
            end.add_done_callback(lambda _: self._ends.append(number))
        answer.add_done_callback(lambda done: self._numbers.pop(done, None))

    def answers(self, numbers: Collection[int]) -> set[Future[list[Turn]]]:
        """The pending answers of requests with these numbers."""
        return {answer for answer, number in list(self._numbers.items()) if number in numbers}

    def is_due(self) -> bool:
        """Count one more step; return whether a report is due."""
        self._steps += 1
        is_time = self._steps >= TOKENS * self._rarity or time.monotonic() >= self._next_s
        return bool(self._numbers) and is_time

    def of(self, samples: Iterable[SampleInFlight]) -> Iterator[SamplesEnded | Progress]:
        """Yield reports of ended samples and of new tokens of submitted `samples`, small enough to be sent by value."""
        self._steps, self._next_s = 0, time.monotonic() + SECONDS * self._rarity
        if self._ends:
            yield SamplesEnded([self._ends.popleft() for _ in range(len(self._ends))])
        news = _ProgressBuilder()
        for each in samples:
            number = self._numbers.get(each.request.future)
            if number is not None and each.told < len(each.token_ids):
                news.add(number, each)
                if len(news.token_ids) >= AT_ONCE:
                    yield news.progress()
                    news = _ProgressBuilder()
        if news.token_ids:
            yield news.progress()


class _ProgressBuilder:
    """Collects the new tokens of several samples, concatenated."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._whose: list[tuple[int, int, int]] = []

    def add(self, number: int, sample: SampleInFlight) -> None:
        token_ids, log_probs, versions = sample.take_untold()
        self.token_ids += token_ids
        self._log_probs += log_probs
        self._versions += versions
        self._whose.append((number, sample.sample, len(token_ids)))

    def progress(self) -> Progress:
        numbers, samples, lengths = np.array(self._whose, dtype=np.int32).T
        log_probs = np.array(self._log_probs, dtype=np.float32)
        token_ids, versions = (np.array(each, dtype=np.int32) for each in (self.token_ids, self._versions))
        return Progress(numbers, samples, lengths, token_ids, log_probs, versions)
