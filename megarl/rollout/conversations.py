"""Which engine, or rank of one, a request goes to, as far as that follows from the conversations that they have."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

_MARGIN = 2
"""So many conversations more than the idlest engine has are worth a prefix that need not be computed."""
_REMEMBERED = 65_536
"""Conversations of which it is known where they were; the oldest are forgotten."""


class Candidate(Protocol):
    """An engine that has room."""

    @property
    def load(self) -> int:
        """How many samples it has that have not ended."""

    @property
    def cache(self) -> Hashable:
        """Names the keys and values that it has: others after a restart, or with other weights."""


E = TypeVar("E", bound=Candidate)


class Conversations(Generic[E]):
    """Counts the conversations that engines have, and remembers where each was asked last.

    A conversation with unanswered requests is active. It stays with the engine that has its prefix, until that engine
    has more active conversations than the idlest one by more than a margin; then it counts as a new conversation. A new
    conversation goes to the engine with the fewest. Neither depends on the time, or on what was answered before, so
    that engines that were idle get the same requests whenever they are asked.

    Example: two engines with a and b active on the first, c on the second. A next turn of a goes to the first, d to the
    second.
    """

    def __init__(self) -> None:
        self._unanswered: dict[E, Counter[int]] = defaultdict(Counter)
        """Requests of each conversation."""
        self._single: Counter[E] = Counter()
        """Requests that are part of none."""
        self._caches: OrderedDict[int, Hashable] = OrderedDict()
        """The one that each conversation's prefix is in, those asked last at the end."""

    def choose(self, conversation: int | None, among: Sequence[E]) -> E:
        """The engine that the next request is asked of; one without a conversation is a new one by itself."""
        others = {each: self._others(conversation, each) for each in among}
        idlest = min(among, key=lambda each: (others[each], each.load))
        if conversation is None or conversation not in self._caches:
            return idlest
        cache, most = self._caches[conversation], others[idlest] + _MARGIN
        return next((each for each in among if each.cache == cache and others[each] <= most), idlest)

    def begin(self, conversation: int | None, engine: E) -> None:
        """Note that a request is asked of an engine."""
        if conversation is None:
            self._single[engine] += 1
            return
        self._unanswered[engine][conversation] += 1
        self._caches[conversation] = engine.cache
        self._caches.move_to_end(conversation)
        if len(self._caches) > _REMEMBERED:
            self._caches.popitem(last=False)

    def end(self, conversation: int | None, engine: E) -> None:
        """Note that an engine is not asked for a request any more: it has answered it, or will not."""
        if conversation is None:
            self._single[engine] -= 1
            return
        unanswered = self._unanswered[engine]
        unanswered[conversation] -= 1
        if not unanswered[conversation]:
            del unanswered[conversation]

    def _others(self, conversation: int | None, engine: E) -> int:
        """How many other conversations an engine has."""
        unanswered = self._unanswered[engine]
        return len(unanswered) - (conversation in unanswered) + self._single[engine]
