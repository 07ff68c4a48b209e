"""When prompts may be sampled, and which groups form the next batch: pure counting, without clock or processes."""

from bisect import bisect_left
from collections.abc import Collection, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf
from typing import Any


@dataclass
class Draw:
    """A drawn prompt that holds a slot: it is being sampled, or finished and waits for a batch.

    Example: Draw(ordinal=4096, is_finished=True, overtaken=0)
    """

    ordinal: int
    is_finished: bool = False
    overtaken: int = 0
    """How many groups that were drawn later have already been taken by batches."""


class Schedule:
    """Slots for the groups of `max_staleness` + 1 batches, and the rule by which batches take finished groups.

    A draw takes a slot when it is admitted, and frees it when its group has been trained on or dropped. A batch takes
    the first `prompts_per_step` finished groups in the order of their draws. With a `window` above 1 it may skip groups
    that are not finished, but no group is overtaken by `window` or more later ones. With window 1 batches follow the
    order of the draws strictly, so neither the length of a response nor timing decides whether it is trained on.

    By construction no token of the batch that is trained at version v was sampled with weights older than
    v - `staleness_bound`. Proof, with S = `max_staleness` and P = `prompts_per_step`: let a group be the k-th of all
    trained groups in the order of draws, from 0. It takes its slot at a version u at which no more than all (S + 1) P
    slots are taken, so k < u P + (S + 1) P, or k // P <= u + S. Before its batch v P groups are trained, of which at
    most k were drawn earlier and window - 1 later, so v <= (k + window - 1) // P <= k // P + ceil((window - 1) / P).

    Example: Schedule(2, max_staleness=1).admissible is 4; after admit([0, 1, 2, 3]) it is 0, and once 0 and 1 are
    finished, take() is [0, 1], and release() lets two more be admitted.
    """

    def __init__(self, prompts_per_step: int, max_staleness: int = 0, window: int = 1, *, version: int = 0) -> None:
        if prompts_per_step < 1 or max_staleness < 0 or window < 1:
            raise ValueError(f"a schedule of {prompts_per_step} prompts, staleness {max_staleness}, window {window}")
        self._batch, self._staleness, self._window = prompts_per_step, max_staleness, window
        self.version = version
        """Version of the weights: the number of batches that have been trained."""
        self._draws: dict[int, Draw] = {}
        """Draws that no batch has taken, by ordinal, in order."""
        self._taken: list[int] = []
        self._last = -1

    @property
    def slots(self) -> int:
        """How many groups may be in flight, finished or in training at the same time."""
        return (self._staleness + 1) * self._batch

    @property
    def staleness_bound(self) -> int:
        """How many versions old a trained token may be."""
        return self._staleness + ceil((self._window - 1) / self._batch)

    @property
    def admissible(self) -> int:
        """How many prompts may be admitted now: the free slots."""
        return self.slots - len(self._draws) - len(self._taken)

    @property
    def unfinished(self) -> list[int]:
        """Ordinals of draws that are not finished, in order; after a restart, they are to be sampled again."""
        return [draw.ordinal for draw in self._draws.values() if not draw.is_finished]

    @property
    def untaken(self) -> KeysView[int]:
        """Ordinals of draws that no batch has taken, finished or not, in order."""
        return self._draws.keys()

    @property
    def waiting(self) -> list[int]:
        """Ordinals of finished groups that no batch has taken, in order."""
        return [draw.ordinal for draw in self._draws.values() if draw.is_finished]

    def admit(self, ordinals: Sequence[int]) -> None:
        """Give slots to draws. Raises ValueError for more than `admissible`, and for repeated or unordered ordinals."""
        if len(ordinals) > self.admissible:
            raise ValueError(f"{len(ordinals)} draws for {self.admissible} free slots")
        for ordinal in ordinals:
            if ordinal <= self._last:
                raise ValueError(f"draw {ordinal} is admitted after {self._last}")
            self._draws[ordinal] = Draw(ordinal)
            self._last = ordinal

    def finish(self, ordinal: int) -> None:
        """Note that the group of a draw is sampled and scored, and may be trained on."""
        self._sampled(ordinal).is_finished = True

    def drop(self, ordinal: int) -> None:
        """Free the slot of a draw whose group will not be trained on."""
        del self._draws[self._sampled(ordinal).ordinal]

    def takeable(self, known: Collection[int] = ()) -> list[int] | None:
        """Ordinals of the next batch, in order; None while it is not complete. Treats `known` as finished, too.

        Tries only the earliest finished groups: they overtake the fewest others, so if they overtake too many, every
        other batch would, too.
        """
        batch, before = list[int](), -inf
        for draw in self._draws.values():
            if draw.is_finished or draw.ordinal in known:
                batch.append(draw.ordinal)
                if len(batch) == self._batch:
                    return batch
            else:
                # Groups of the batch that were drawn before this one do not overtake it.
                before = max(before, draw.overtaken - len(batch))
            # One more group would overtake every skipped one: stop early, since this runs over thousands per answer.
            if before + len(batch) + 1 >= self._window:
                return None
        return None

    def take(self) -> list[int]:
        """Take the next batch to train on. Raises ValueError if there is none, or the last one is not released."""
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
        """Ordinal -> latest version at which the group of a draw is trained, if no group is dropped."""
        # Before it, at most the draws ahead of it are trained, plus those that may still overtake it.
        return {
            draw.ordinal: self.version + (place + max(0, self._window - 1 - draw.overtaken)) // self._batch
            for place, draw in enumerate(self._draws.values())
        }

    def release(self) -> None:
        """Note that the taken batch is trained and the new weights are served: frees its slots."""
        if not self._taken:
            raise ValueError("no batch is taken")
        self._taken = []
        self.version += 1

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`. Raises ValueError between `take` and `release`."""
        if self._taken:
            raise ValueError("a batch is trained on: the state before it and after it can be kept, not this one")
        return {"version": self.version, "last": self._last, "draws": [asdict(draw) for draw in self._draws.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Raises ValueError if it has more draws than there are slots."""
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
