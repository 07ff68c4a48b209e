"""Routes requests by conversation to an engine, or to a data-parallel rank of one."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

_MARGIN = 2
"""A cached prefix is worth this many conversations more than the idlest engine has."""
_REMEMBERED = 65_536
"""Conversations whose engine is remembered; the oldest are forgotten."""


class Candidate(Protocol):
    """An engine, or rank of one, that a request may go to."""

    @property
    def load(self) -> int:
        """The number of its unfinished samples."""

    @property
    def cache(self) -> Hashable:
        """Identifies its KV cache: a restart or new weights change it."""


E = TypeVar("E", bound=Candidate)


class Conversations(Generic[E]):
    """Counts the active conversations of each engine, and remembers where each conversation was last.

    A conversation with unanswered requests is active. It stays with the engine that has its prefix, unless that engine
    has more active conversations than the idlest one by more than a margin; then it counts as new. A new conversation
    goes to the engine with the fewest active ones. Neither rule depends on time or on earlier answers, so idle engines
    always get the same requests in the same order.

    Example: two engines with a and b active on the first, c on the second. The next turn of a goes to the first, a new
    conversation d to the second.
    """

    def __init__(self) -> None:
        self._unanswered: dict[E, Counter[int]] = defaultdict(Counter)
        """Unanswered requests of each conversation."""
        self._single: Counter[E] = Counter()
        """Unanswered requests without a conversation."""
        self._caches: OrderedDict[int, Hashable] = OrderedDict()
        """The cache that holds each conversation's prefix; the most recent conversation is last."""

    def choose(self, conversation: int | None, among: Sequence[E]) -> E:
        """The engine for the next request; a request without a conversation counts as a new one."""
        others = {each: self._others(conversation, each) for each in among}
        idlest = min(among, key=lambda each: (others[each], each.load))
        if conversation is None or conversation not in self._caches:
            return idlest
        cache, most = self._caches[conversation], others[idlest] + _MARGIN
        return next((each for each in among if each.cache == cache and others[each] <= most), idlest)

    def begin(self, conversation: int | None, engine: E) -> None:
        """Note that a request was sent to an engine."""
        if conversation is None:
            self._single[engine] += 1
            return
        self._unanswered[engine][conversation] += 1
        self._caches[conversation] = engine.cache
        self._caches.move_to_end(conversation)
        if len(self._caches) > _REMEMBERED:
            self._caches.popitem(last=False)

    def end(self, conversation: int | None, engine: E) -> None:
        """Note that a request has ended: the engine has answered it, or never will."""
        if conversation is None:
            self._single[engine] -= 1
            return
        unanswered = self._unanswered[engine]
        unanswered[conversation] -= 1
        if not unanswered[conversation]:
            del unanswered[conversation]

    def _others(self, conversation: int | None, engine: E) -> int:
        """The number of other active conversations of an engine."""
        unanswered = self._unanswered[engine]
        return len(unanswered) - (conversation in unanswered) + self._single[engine]
