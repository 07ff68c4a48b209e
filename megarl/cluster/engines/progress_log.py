"""Tokens of unanswered requests, kept for when an engine dies."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from megarl.data import Turn
from megarl.data.stretches import fetch
from megarl.data.trajectory import FloatArray, IntArray
from megarl.rollout.protocol import Progress

_TOGETHER = 256
"""Reports after which the log is compacted; each has some tokens of hundreds of samples, 100 kB in all."""


class PartialSample(NamedTuple):
    """The beginning of a sample: its tokens, their log-probs and the versions that sampled them."""

    token_ids: IntArray
    log_probs: FloatArray
    versions: IntArray

    @classmethod
    def of(cls, turn: Turn) -> "PartialSample":
        """Make it from an aborted turn."""
        return cls(fetch(turn.token_ids), fetch(turn.log_probs), fetch(turn.versions))

    def cut(self) -> Turn:
        """An aborted turn of just these tokens, without a prompt."""
        # Not `Turn.of`, which compresses versions: that takes as long as the rest of a checkpoint, which stores them in
        # full.
        return Turn(NOTHING.token_ids, *self, "abort")

    @classmethod
    def joined(cls, pieces: Sequence["PartialSample"]) -> "PartialSample":
        """Concatenate the pieces of a sample, at least one, in order."""
        return cls(*(np.concatenate(each) for each in zip(*pieces, strict=True)))

    def __add__(self, other: "PartialSample") -> "PartialSample":  # type: ignore[override]
        return self.joined([self, other])

    def ended_by(self, turn: Turn) -> Turn:
        """The whole turn of a sample that another engine has finished."""
        if not len(self.token_ids):
            return turn
        whole = self + PartialSample.of(turn)
        prompt_ids = fetch(turn.prompt_ids)[: -len(self.token_ids)]
        return replace(Turn.of(prompt_ids, *whole, turn.finish_reason, turn.routed_experts), text=turn.text)


NOTHING = PartialSample(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
"""A sample without tokens."""


class ProgressLog:
    """The tokens that one engine reported. They are read only when it dies or a run is saved: mostly never."""

    def __init__(self) -> None:
        self._told: list[Progress] = []
        """Reports that are not yet split by sample."""
        self._pieces: dict[tuple[int, int], list[PartialSample]] = {}
        """Pieces of each sample, by request and sample number; they are not copied again."""

    def add(self, progress: Progress) -> None:
        """Add an engine's report."""
        self._told.append(progress)

    def copy(self) -> "ProgressLog":
        """A copy that does not see later reports."""
        copied = ProgressLog()
        copied._told = self._told.copy()
        copied._pieces = {whose: pieces.copy() for whose, pieces in self._pieces.items()}
        return copied

    @property
    def are_many(self) -> bool:
        """Whether it is time to drop answered requests."""
        return len(self._told) >= _TOGETHER

    def keep(self, numbers: Collection[int]) -> None:
        """Drop all requests except these."""
        kept = set(numbers)
        self._pieces = {whose: pieces for whose, pieces in self._pieces.items() if whose[0] in kept}
        if self._told:
            for whose, piece in _by_sample(self._told, kept):
                self._pieces.setdefault(whose, []).append(piece)
            self._told = []

    def of(self, numbers: Collection[int]) -> dict[int, dict[int, PartialSample]]:
        """The partial samples of these requests, by request and sample number."""
        self.keep(numbers)
        found: dict[int, dict[int, PartialSample]] = {}
        for (number, sample), pieces in self._pieces.items():
            found.setdefault(number, {})[sample] = PartialSample.joined(pieces)
        return found


def _by_sample(told: Sequence[Progress], numbers: Collection[int]) -> Iterator[tuple[tuple[int, int], PartialSample]]:
    """Yield the reported tokens of these requests, one piece per sample, in the order of arrival."""
    whose, samples, lengths, *of_tokens = (
        np.concatenate([getattr(each, field.name) for each in told]) for field in fields(Progress)
    )
    order = np.lexsort((samples, whose))
    order = order[np.isin(whose[order], np.fromiter(numbers, np.int64, len(numbers)))]
    starts = lengths.cumsum() - lengths
    whose, samples, lengths, starts = (each[order] for each in (whose, samples, lengths, starts))
    # The index of every token: each piece's tokens are counted from the piece's own start.
    places = np.repeat(starts - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
    firsts = np.flatnonzero((np.diff(whose, prepend=-1) != 0) | (np.diff(samples, prepend=-1) != 0))
    ends = lengths.cumsum()[firsts[1:] - 1]
    pieces = zip(*(np.split(each[places], ends) for each in of_tokens), strict=True)
    # Splitting nothing still gives one empty piece.
    for number, sample, piece in zip(whose[firsts].tolist(), samples[firsts].tolist(), pieces, strict=False):
        # Copied, as a view for one long response would keep the whole report in memory.
        yield (number, sample), PartialSample(*(each.copy() for each in piece))
