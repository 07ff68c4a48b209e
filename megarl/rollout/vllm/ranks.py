"""Chooses the rank of a data-parallel vLLM engine for a prompt; each rank has a KV cache of its own."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from megarl.rollout.conversations import Conversations
from megarl.rollout.vllm.core import SampleRequest


@dataclass(eq=False)
class _Rank:
    number: int
    load: int = 0
    """The number of unfinished samples."""
    salt: str | None = None
    """The cache salt of the rank's samples; another salt means that its cache is of no use."""

    @property
    def cache(self) -> Hashable:
        return self.number, self.salt


@dataclass(eq=False)
class _Placed:
    """The samples of one prompt, placed on a rank."""

    conversation: int | None
    rank: _Rank
    left: int


class Ranks:
    """The ranks of an engine, chosen by the same rule as engines: see `Conversations`."""

    def __init__(self, many: int) -> None:
        self._ranks = [_Rank(number) for number in range(many)]
        self._conversations = Conversations[_Rank]()
        self._placed: dict[str, _Placed] = {}

    def place(self, samples: Sequence[SampleRequest], conversation: int | None) -> None:
        """Assign all samples of one prompt to one rank, by the prompt's conversation."""
        for rank in self._ranks:
            rank.salt = samples[0].cache_salt
        chosen = self._conversations.choose(conversation, self._ranks)
        self._conversations.begin(conversation, chosen)
        placed = _Placed(conversation, chosen, len(samples))
        chosen.load += len(samples)
        for sample in samples:
            sample.data_parallel_rank = chosen.number
            self._placed[sample.request_id] = placed

    def end(self, ids: Iterable[str]) -> None:
        """Note that samples have ended or were aborted."""
        for name in ids:
            placed = self._placed.pop(name)
            placed.rank.load -= 1
            placed.left -= 1
            if not placed.left:
                self._conversations.end(placed.conversation, placed.rank)
