"""Groups that dynamic sampling has dropped, until the batch that reports them is taken."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from megarl.data import PromptGroup, Trajectory


class Dropped:
    """Dropped groups that are not reported yet, in the order of their draws.

    A batch reports the dropped groups that were drawn before its last group. All others are left to later batches, so
    that metrics do not depend on timing.
    """

    def __init__(self, groups: Iterable[PromptGroup] = ()) -> None:
        self._groups = sorted(groups, key=_ordinal)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def all(self) -> list[PromptGroup]:
        """All dropped groups that are not reported yet."""
        return self._groups.copy()

    def add(self, group: PromptGroup) -> None:
        """Add a group, without its routed experts: they are large, and nothing replays them."""
        trajectories = [_without_experts(each) for each in group.trajectories]
        baseline = group.baseline and _without_experts(group.baseline)
        insort(self._groups, group.with_members(trajectories, baseline), key=_ordinal)

    def before(self, ordinal: int) -> list[PromptGroup]:
        """The groups that were drawn before `ordinal`."""
        return self._groups[: self._place(ordinal)]

    def take_before(self, ordinal: int) -> list[PromptGroup]:
        """Remove and return the groups that were drawn before `ordinal`: they count as reported."""
        taken, self._groups = self.before(ordinal), self._groups[self._place(ordinal) :]
        return taken

    def most_between(self, ordinals: Iterable[int]) -> int:
        """Largest number of dropped groups between two consecutive `ordinals` (ascending): one batch reports them all.

        The groups before the first and after the last of `ordinals` count as well.
        """
        places = [0, *map(self._place, ordinals), len(self._groups)]
        return max(end - start for start, end in pairwise(places))

    def _place(self, ordinal: int) -> int:
        return bisect_left(self._groups, ordinal, key=_ordinal)


def _ordinal(group: PromptGroup) -> int:
    return group.ordinal


def _without_experts(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, turns=tuple(replace(turn, routed_experts=()) for turn in trajectory.turns))
