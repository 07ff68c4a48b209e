"""Which rank of a data-parallel vLLM engine a prompt goes to: each has keys and values of its own."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from megarl.rollout.conversations import Conversations
from megarl.rollout.vllm.core import SampleRequest


@dataclass(eq=False)
class _Rank:
    number: int
    load: int = 0
    """Samples that have not ended."""
    salt: str | None = None
    """The samples that it gets have this one: keys and values of others are none of theirs."""

    @property
    def cache(self) -> Hashable:
        return self.number, self.salt


@dataclass(eq=False)
class _Placed:
    """Samples of one prompt."""

    conversation: int | None
    rank: _Rank
    left: int


class Ranks:
    """The ranks of an engine, by the rule that engines are chosen by: see `Conversations`."""

    def __init__(self, many: int) -> None:
        self._ranks = [_Rank(number) for number in range(many)]
        self._conversations = Conversations[_Rank]()
        self._placed: dict[str, _Placed] = {}

    def place(self, samples: Sequence[SampleRequest], conversation: int | None) -> None:
        """Give the samples of one prompt, which is part of a conversation, to a rank, all to the same."""
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
        """Note that samples have ended, or are not asked for any more."""
        for name in ids:
            placed = self._placed.pop(name)
            placed.rank.load -= 1
            placed.left -= 1
            if not placed.left:
                self._conversations.end(placed.conversation, placed.rank)
