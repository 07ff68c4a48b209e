"""A scripted engine: responses of random lengths at a steady pace, without a model."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from megarl.data import Turn
from megarl.data.stretches import Array, fetch
from megarl.rollout.progress_reporter import AT_ONCE, OFTEN, SECONDS
from megarl.rollout.protocol import Event, Progress, Request, RequestEnded, SamplingParameters

_TOKENS = (3, 13)
_WITH_TEXT = 64
_NOTHING = (-1, Request([], SamplingParameters()))


class ScriptedEngine:
    """Answers one request every `pace_s`, in the order of arrival, and at most `only` of them, if given.

    Meanwhile it reports tokens of all requests, as real engines do (`megarl.rollout.progress_reporter`): each sample's
    tokens grow linearly until its answer. With `only` it reports the first half of every other request.
    """

    def __init__(self, _model_path: Path, arguments: Mapping[str, Any]) -> None:
        self._pace_s, self._median = arguments["pace_s"], arguments["median_tokens"]
        self._only = arguments.get("only")
        self._asked = SimpleQueue[tuple[int, Request] | None]()
        self._told = self._version = 0

    def start(self) -> None:
        """Do nothing: it is ready at once."""

    def version(self) -> int:
        """The version of its imaginary weights."""
        return self._version

    def serve(self, version: int) -> None:
        """Attribute all tokens from now on to this version."""
        self._version = version

    def worker_parts(self) -> Sequence[int]:
        """Return one worker."""
        return [0]

    def told(self) -> int:
        """How often it reported new tokens of a sample."""
        return self._told

    def submit(self, requests: Mapping[int, Request]) -> None:
        """See `Sampler.submit`."""
        for asked in requests.items():
            self._asked.put(asked)

    def events(self, engines: int = 1) -> Iterator[list[Event]]:
        """See `Sampler.events`."""
        growing = deque[_Growing]()
        answered, due, next_tell = 0, time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            wait_s = min(growing[0].end_s, next_tell) - now if growing else None
            try:
                asked = self._asked.get(timeout=None if wait_s is None else max(wait_s, 1e-4))
            except Empty:
                asked = _NOTHING
            if asked is None:
                return
            now = time.monotonic()
            if asked is not _NOTHING:
                number, request = asked
                answer = self._answer(request)
                if answered == self._only:
                    yield [_first_half(number, sample, turn) for sample, turn in enumerate(answer)]
                    continue  # never answered
                answered += 1
                due = max(due, now) + self._pace_s
                growing.append(_Growing(number, answer, now, due))
            if growing and growing[0].end_s <= now:
                ended = growing.popleft()
                yield [RequestEnded(ended.number, ended.answer)]
            elif growing and next_tell <= now and self._only is None:
                next_tell = now + SECONDS * max(1.0, engines / OFTEN)
                if pieces := list[Event](_news(growing, now)):
                    self._told += sum(len(each.numbers) for each in pieces if isinstance(each, Progress))
                    yield pieces

    def close(self) -> None:
        """End `events`."""
        self._asked.put(None)

    def _answer(self, request: Request) -> list[Turn]:
        generator = np.random.default_rng(request.sampling.seed)
        drawn = generator.lognormal(np.log(self._median), 1.0, request.sampling.samples)
        return [
            _turn(request, generator, length, self._version) for length in np.clip(drawn, 1, 16384).astype(int).tolist()
        ]


@dataclass
class _Growing:
    """A request until it is answered."""

    number: int
    answer: list[Turn]
    begin_s: float
    end_s: float

    def __post_init__(self) -> None:
        self.lengths = np.array([len(turn.token_ids) for turn in self.answer])
        self.told = np.zeros_like(self.lengths)

    def take_new(self, now_s: float) -> Array:
        """The number of new tokens of each sample since the last report."""
        there = (self.lengths * (now_s - self.begin_s) / (self.end_s - self.begin_s)).astype(np.int64)
        new, self.told = there - self.told, there
        return new


def _news(growing: Iterable[_Growing], now_s: float) -> Iterator[Progress]:
    """New tokens of all requests, in pieces of realistic size; nobody reads the token ids."""
    whose = [(each.number, sample, new) for each in growing for sample, new in enumerate(each.take_new(now_s).tolist())]
    news = np.array([each for each in whose if each[2]], dtype=np.int32).reshape(-1, 3)
    for piece in np.split(news, np.flatnonzero(np.diff(news[:, 2].cumsum() // AT_ONCE)) + 1):
        if len(piece):
            numbers, samples, lengths = piece.T
            tokens = np.zeros(lengths.sum(), dtype=np.int32)
            yield Progress(numbers, samples, lengths, tokens, tokens.astype(np.float32), tokens)


def _first_half(number: int, sample: int, turn: Turn) -> Progress:
    count = (len(turn.token_ids) + 1) // 2
    numbers, samples, lengths = (np.full(1, each, dtype=np.int32) for each in (number, sample, count))
    token_ids, log_probs, versions = (fetch(each)[:count] for each in (turn.token_ids, turn.log_probs, turn.versions))
    return Progress(numbers, samples, lengths, token_ids, log_probs, versions)


def _turn(request: Request, generator: np.random.Generator, length: int, version: int) -> Turn:
    turn = Turn.of(
        request.prompt_token_ids,
        generator.integers(*_TOKENS, length, dtype=np.int32),
        generator.random(length, dtype=np.float32) - 1.0,
        np.full(length, version, dtype=np.int32),
        "stop",
    )
    # As in all engines.
    return replace(turn, text="7" * length) if length >= _WITH_TEXT else turn
