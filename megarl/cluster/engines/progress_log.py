"""Tokens of requests that are not answered: what there is of them when an engine dies."""

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from megarl.data import Turn
from megarl.data.stretches import here
from megarl.data.trajectory import FloatArray, IntArray
from megarl.rollout.protocol import Progress

_TOGETHER = 256
"""Pieces of news that are put together: each has some tokens of hundreds of samples, 100 kB in all."""


class PartialSample(NamedTuple):
    """The beginning of a sample: its tokens, their log-probs and the versions that sampled them."""

    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray

    @classmethod
    def of(cls, turn: Turn) -> "PartialSample":
        """A turn that was cut."""
        return cls(here(turn.token_ids), here(turn.log_probs), here(turn.versions))

    def cut(self) -> Turn:
        """A turn of these tokens alone, without a prompt, that was cut behind them."""
        # Not `Turn.of`: to say versions once takes as long as all else of a checkpoint, in which they are said in full.
        return Turn(NOTHING.token_ids, *self, "abort")

    def __add__(self, other: "PartialSample") -> "PartialSample":  # type: ignore[override]
        return PartialSample(*(np.concatenate(both) for both in zip(self, other, strict=True)))

    def ended_by(self, turn: Turn) -> Turn:
        """The whole turn of a sample that another engine has ended."""
        if not len(self.token_ids):
            return turn
        whole = self + PartialSample.of(turn)
        prompt_ids = here(turn.prompt_ids)[: -len(self.token_ids)]
        return replace(Turn.of(prompt_ids, *whole, turn.finish_reason, turn.routed_experts), text=turn.text)


NOTHING = PartialSample(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
"""A sample of no tokens."""


class ProgressLog:
    """Tokens that one engine told of, looked at when it dies and when a run is saved; most of them never are."""

    def __init__(self) -> None:
        self._told: list[Progress] = []

    def add(self, progress: Progress) -> None:
        """Keep what an engine told."""
        self._told.append(progress)

    def copy(self) -> "ProgressLog":
        """The same news, apart from what is told later."""
        copied = ProgressLog()
        copied._told = self._told.copy()
        return copied

    @property
    def are_many(self) -> bool:
        """Whether it is time to forget what is answered."""
        return len(self._told) >= _TOGETHER

    def keep(self, numbers: Collection[int]) -> None:
        """Forget all requests but these."""
        if self._told:
            self._told = [_merged(self._told, numbers)]

    def of(self, numbers: Collection[int]) -> dict[int, dict[int, PartialSample]]:
        """The beginnings of samples of these requests, by request and sample."""
        self.keep(numbers)
        found: dict[int, dict[int, PartialSample]] = {}
        for told in self._told:
            ends = told.lengths.cumsum()
            pieces = (told.numbers, told.samples, ends - told.lengths, ends)
            for number, sample, start, end in zip(*(each.tolist() for each in pieces), strict=True):
                new = PartialSample(told.token_ids[start:end], told.log_probs[start:end], told.versions[start:end])
                found.setdefault(number, {})[sample] = new
        return found


def _merged(told: Sequence[Progress], numbers: Collection[int]) -> Progress:
    """The news of these requests, all of a sample in one piece, in the order in which it came."""
    whose, samples, lengths, *of_tokens = (
        np.concatenate([getattr(each, field.name) for each in told]) for field in fields(Progress)
    )
    order = np.lexsort((samples, whose))
    order = order[np.isin(whose[order], np.fromiter(numbers, np.int64, len(numbers)))]
    starts = lengths.cumsum() - lengths
    whose, samples, lengths, starts = (each[order] for each in (whose, samples, lengths, starts))
    # The places of the tokens of each piece: from its own start on, instead of from where the pieces before it end.
    places = np.repeat(starts - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
    firsts = np.flatnonzero((np.diff(whose, prepend=-1) != 0) | (np.diff(samples, prepend=-1) != 0))
    of_samples = np.add.reduceat(lengths, firsts) if len(firsts) else lengths
    return Progress(whose[firsts], samples[firsts], of_samples.astype(np.int32), *(each[places] for each in of_tokens))
