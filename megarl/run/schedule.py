"""When prompts may be sampled, and which groups make the next batch: no clock, no processes, nothing but counting."""

from bisect import bisect_left
from collections.abc import Collection, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf
from typing import Any


@dataclass
class Draw:
    """One drawn prompt that holds a slot: it is sampled, or finished, or in the batch that is trained on.

    Example: Draw(ordinal=4096, is_finished=True, overtaken=0)
    """

    ordinal: int
    is_finished: bool = False
    overtaken: int = 0
    """How many groups that were drawn later are trained already."""


class Schedule:
    """Slots for the groups of `max_staleness` + 1 batches, and the rule by which finished ones are taken.

    A draw takes a slot when it is admitted and gives it back when its group was trained on or dropped. A batch has the
    first `prompts_per_step` finished groups in the order in which they were drawn; with a `window` above 1 it may leave
    groups behind that are not finished, but none is overtaken by `window` later ones. So with window 1 batches are
    taken in order, and nothing of a response's length or luck decides whether it is trained on.

    By construction no token of the batch that is trained at version v was sampled with weights older than
    v - `staleness_bound`. Proof: the group that is the k-th to be trained in the order of draws, from 0, takes its slot
    at a version u where at most all (S + 1) P slots are taken, so k < u P + (S + 1) P, or k // P <= u + S. Before its
    batch v P groups are trained, at most k that were drawn earlier and window - 1 later, so
    v <= (k + window - 1) // P <= k // P + ceil((window - 1) / P).

    Example: Schedule(2, max_staleness=1).admissible is 4; after admit([0, 1, 2, 3]) it is 0, and once 0 and 1 are
    finished, take() is [0, 1], and release() lets two more be admitted.
    """

    def __init__(self, prompts_per_step: int, max_staleness: int = 0, window: int = 1, *, version: int = 0) -> None:
        if prompts_per_step < 1 or max_staleness < 0 or window < 1:
            raise ValueError(f"a schedule of {prompts_per_step} prompts, staleness {max_staleness}, window {window}")
        self._batch, self._staleness, self._window = prompts_per_step, max_staleness, window
        self.version = version
        """The version of the weights, which is the number of batches that were trained."""
        self._draws: dict[int, Draw] = {}
        """The draws that no batch has taken, in their order."""
        self._taken: list[int] = []
        self._last = -1

    @property
    def slots(self) -> int:
        """How many groups may be sampled, finished or trained on at the same time."""
        return (self._staleness + 1) * self._batch

    @property
    def staleness_bound(self) -> int:
        """How many versions old a trained token is at most."""
        return self._staleness + ceil((self._window - 1) / self._batch)

    @property
    def admissible(self) -> int:
        """How many prompts may be drawn now."""
        return self.slots - len(self._draws) - len(self._taken)

    @property
    def unfinished(self) -> list[int]:
        """The ordinals that are to be sampled, in the order of their draws; after a restart, anew."""
        return [draw.ordinal for draw in self._draws.values() if not draw.is_finished]

    @property
    def untaken(self) -> KeysView[int]:
        """The ordinals that no batch has taken, finished or not, in the order of their draws."""
        return self._draws.keys()

    @property
    def waiting(self) -> list[int]:
        """The ordinals of finished groups that no batch has taken."""
        return [draw.ordinal for draw in self._draws.values() if draw.is_finished]

    def admit(self, ordinals: Sequence[int]) -> None:
        """Give slots to draws. Raises ValueError if there are fewer, or draws come again or out of order."""
        if len(ordinals) > self.admissible:
            raise ValueError(f"{len(ordinals)} draws for {self.admissible} free slots")
        for ordinal in ordinals:
            if ordinal <= self._last:
                raise ValueError(f"draw {ordinal} is admitted after {self._last}")
            self._draws[ordinal] = Draw(ordinal)
            self._last = ordinal

    def finish(self, ordinal: int) -> None:
        """Note that the group of a draw is sampled and scored, and can be trained on."""
        self._sampled(ordinal).is_finished = True

    def drop(self, ordinal: int) -> None:
        """Give back the slot of a draw whose group is not trained on: the next draw takes its place."""
        del self._draws[self._sampled(ordinal).ordinal]

    def takeable(self, known: Collection[int] = ()) -> list[int] | None:
        """The ordinals of the next batch, in order; None while a group of it is not finished.

        With `known` ordinals it is the next batch if these were finished, too.

        The earliest finished groups overtake the fewest others, so if they overtake too many, all batches do.
        """
        batch, before = list[int](), -inf
        for draw in self._draws.values():
            if draw.is_finished or draw.ordinal in known:
                batch.append(draw.ordinal)
                if len(batch) == self._batch:
                    return batch
            else:
                # Draws of the batch that come before this draw do not overtake it.
                before = max(before, draw.overtaken - len(batch))
            # A further one would overtake all that are left behind. This is asked of thousands at each answer.
            if before + len(batch) + 1 >= self._window:
                return None
        return None

    def take(self) -> list[int]:
        """Take the next batch, to train on it. Raises ValueError if there is none, or one is trained on already."""
        batch = self.takeable()
        if batch is None or self._taken:
            raise ValueError("no batch is finished" if batch is None else "a batch is taken, and not released")
        for ordinal in batch:
            del self._draws[ordinal]
        for draw in self._draws.values():
            draw.overtaken += len(batch) - bisect_left(batch, draw.ordinal)
        self._taken = batch
        return batch

    def latest_versions(self) -> dict[int, int]:
        """The version at which the group of each draw is trained at the latest, if none is dropped; by ordinal."""
        # Before it no more are trained than are there before it, and than may still overtake it.
        return {
            draw.ordinal: self.version + (place + max(0, self._window - 1 - draw.overtaken)) // self._batch
            for place, draw in enumerate(self._draws.values())
        }

    def release(self) -> None:
        """Note that the batch which was taken is trained and its weights are served: its slots are free."""
        if not self._taken:
            raise ValueError("no batch is taken")
        self._taken = []
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on; between a release and the next take."""
        if self._taken:
            raise ValueError("a batch is trained on: the state before it and after it can be kept, not this one")
        return {"version": self.version, "last": self._last, "draws": [asdict(draw) for draw in self._draws.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises ValueError if there are fewer slots than it has draws."""
        draws = [Draw(**each) for each in state["draws"]]
        if len(draws) > self.slots:
            raise ValueError(f"{len(draws)} draws for {self.slots} slots")
        self.version, self._last = state["version"], state["last"]
        self._draws, self._taken = {draw.ordinal: draw for draw in draws}, []

    def _sampled(self, ordinal: int) -> Draw:
        draw = self._draws.get(ordinal)
        if draw is None or draw.is_finished:
            raise ValueError(f"draw {ordinal} is not being sampled")
        return draw
