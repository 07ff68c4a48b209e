"""Tokens of unfinished requests, told of in time: whoever asked has them if the engine dies."""

import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from megarl.data import Turn
from megarl.rollout.protocol import Progress
from megarl.rollout.request_in_flight import SampleInFlight

_TOKENS = 64
_SECONDS = 0.05


class Telling:
    """Makes the `Progress` of the requests that were submitted, after so many steps or seconds."""

    def __init__(self) -> None:
        self._numbers: dict[Future[list[Turn]], int] = {}
        self._steps = 0
        self._next_s = 0.0

    def begin(self, number: int, answer: Future[list[Turn]]) -> None:
        """Tell of a request from now on, until it is answered."""
        self._numbers[answer] = number
        answer.add_done_callback(lambda done: self._numbers.pop(done, None))

    def answers(self, numbers: Collection[int]) -> set[Future[list[Turn]]]:
        """The answers that are due to requests with these numbers."""
        return {answer for answer, number in list(self._numbers.items()) if number in numbers}

    def is_due(self) -> bool:
        """Whether to tell, after one more step."""
        self._steps += 1
        return bool(self._numbers) and (self._steps >= _TOKENS or time.monotonic() >= self._next_s)

    def of(self, samples: Iterable[SampleInFlight]) -> Progress | None:
        """The new tokens of those `samples` that were submitted, if there are any."""
        self._steps, self._next_s = 0, time.monotonic() + _SECONDS
        whose: list[tuple[int, int, int]] = []
        token_ids: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []
        for each in samples:
            number = self._numbers.get(each.request.future)
            if number is not None and each.told < len(each.token_ids):
                new, of_new, sampled_by = each.take_untold()
                whose.append((number, each.sample, len(new)))
                token_ids += new
                log_probs += of_new
                versions += sampled_by
        if not whose:
            return None
        numbers, places, lengths = np.array(whose, dtype=np.int32).T
        return Progress(numbers, places, lengths, _int32(token_ids), np.array(log_probs, np.float32), _int32(versions))


def _int32(values: list[int]) -> Any:
    return np.array(values, dtype=np.int32)
