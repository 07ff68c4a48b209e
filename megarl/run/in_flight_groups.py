"""Groups in flight, until they are scored: their partial samples go into a checkpoint and continue from it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count

from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.engines.pending_request import PartialTurns, PendingRequest
from megarl.data import PromptGroup
from megarl.rollout.protocol import Request
from megarl.run.saved_partials import SavedPartial


class InFlightGroups:
    """Requests of the groups being sampled, and after a restart the saved tokens of those that are to continue."""

    def __init__(self, engines: EngineGroup) -> None:
        self._engines = engines
        self._pending: dict[int, Sequence[PendingRequest]] = {}
        self._saved: dict[int, Sequence[SavedPartial]] = {}

    def begin(
        self,
        groups: Sequence[PromptGroup],
        requests: Sequence[Request],
        on_answered: Callable[[PromptGroup, Sequence[Future]], None],
    ) -> None:
        """Begin sampling groups, each continuing its saved tokens; `on_answered` gets a group's answers.

        `requests` holds one request per group, optionally followed by a second one per group.
        """
        pending = self._engines.begin_generate(requests, self._take_saved(groups, requests))
        for place, group in enumerate(groups):
            self._pending[group.ordinal] = own = pending[place :: len(groups)]
            when_answered(own, partial(on_answered, group))

    def end(self, ordinal: int) -> None:
        """Forget a group whose samples have been handed on."""
        del self._pending[ordinal]

    def copy(self, only: Collection[int] | None = None) -> "InFlightGroups":
        """Snapshot of the groups; `only` restricts those that have begun to these ordinals."""
        copied = InFlightGroups(self._engines)
        copied._pending = {ordinal: own for ordinal, own in self._pending.items() if only is None or ordinal in only}
        copied._saved = self._saved.copy()
        return copied

    def partials(self) -> dict[int, Sequence[SavedPartial]]:
        """Partial samples by group ordinal: of groups in flight, and of loaded groups that have not begun."""
        pending = self._pending.copy()
        there = iter(self._engines.partial_turns([each for own in pending.values() for each in own]))
        parts = {
            ordinal: [SavedPartial.of(each.request, next(there)) for each in own] for ordinal, own in pending.items()
        }
        return parts | self._saved

    def load(self, partials: Mapping[int, Sequence[SavedPartial]]) -> None:
        """Have groups continue their saved partial samples when they begin."""
        self._saved = dict(partials)

    def _take_saved(self, groups: Sequence[PromptGroup], requests: Sequence[Request]) -> list[PartialTurns]:
        found: list[PartialTurns] = [{} for _ in requests]
        for place, group in enumerate(groups):
            own = range(place, len(requests), len(groups))
            for each, saved in zip(own, self._saved.pop(group.ordinal, ()), strict=False):
                found[each] = saved.behind(requests[each])
        return found


def when_answered(pending: Sequence[PendingRequest], on_answered: Callable[[Sequence[Future]], None]) -> None:
    """Call `on_answered` with the answers of all requests, once all are there."""
    answers, ended, total = [each.answer for each in pending], count(1), len(pending)

    def note(_: Future) -> None:
        if next(ended) == total:
            on_answered(answers.copy())
            # Each answer refers to its callback, which refers to all answers: break the cycle, so that their tokens are
            # freed without garbage collection.
            answers.clear()

    for each in pending:
        each.answer.add_done_callback(note)
