"""An engine that answers by a script: responses of drawn lengths, at a steady pace, without a model."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from megarl.data import Turn
from megarl.data.stretches import here
from megarl.rollout.protocol import Event, Progress, Request

_TOKENS = (3, 13)
_WITH_TEXT = 64


class ScriptedEngine:
    """Answers a request every `pace_s`, in the order in which they come, and `only` so many, if that is said.

    It tells the first half of each other one.
    """

    def __init__(self, _model_path: Path, arguments: Mapping[str, Any]) -> None:
        self._pace_s, self._median = arguments["pace_s"], arguments["median_tokens"]
        self._only = arguments.get("only")
        self._asked = SimpleQueue[tuple[int, Request] | None]()

    def start(self) -> None:
        """Be up."""

    def version(self) -> int:
        """The version of the weights that there are not."""
        return 0

    def worker_parts(self) -> Sequence[int]:
        """One worker."""
        return [0]

    def submit(self, requests: Mapping[int, Request]) -> None:
        """See `Generator.submit`."""
        for asked in requests.items():
            self._asked.put(asked)

    def events(self) -> Iterator[list[Event | Progress]]:
        """See `Generator.events`."""
        answered, due = 0, time.monotonic()
        while (asked := self._asked.get()) is not None:
            number, request = asked
            answer = self._answer(request)
            if answered == self._only:
                yield [_first_half(number, sample, turn) for sample, turn in enumerate(answer)]
                continue  # it goes on for ever
            due = max(due + self._pace_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            yield [Event(number, answer)]
            answered += 1

    def close(self) -> None:
        """End `events`."""
        self._asked.put(None)

    def _answer(self, request: Request) -> list[Turn]:
        generator = np.random.default_rng(request.sampling.seed)
        drawn = generator.lognormal(np.log(self._median), 1.0, request.sampling.samples)
        return [_turn(request, generator, length) for length in np.clip(drawn, 1, 16384).astype(int).tolist()]


def _first_half(number: int, sample: int, turn: Turn) -> Progress:
    count = (len(turn.token_ids) + 1) // 2
    numbers, samples, lengths = (np.full(1, each, dtype=np.int32) for each in (number, sample, count))
    token_ids, log_probs, versions = (here(each)[:count] for each in (turn.token_ids, turn.log_probs, turn.versions))
    return Progress(numbers, samples, lengths, token_ids, log_probs, versions)


def _turn(request: Request, generator: np.random.Generator, length: int) -> Turn:
    turn = Turn.of(
        request.prompt_token_ids,
        generator.integers(*_TOKENS, length, dtype=np.int32),
        generator.random(length, dtype=np.float32) - 1.0,
        np.zeros(length, dtype=np.int32),
        "stop",
    )
    # As all engines do.
    return replace(turn, text="7" * length) if length >= _WITH_TEXT else turn
