"""Whose turn it is on GPUs that trainers and engines share: one side's memory leaves before the other's comes.

A step goes through three turns. The engines have weights and KV cache, and sample. The trainers have weights, gradients
and optimizer states, and learn. In a refit the ranks and the engines have their weights, and nothing else.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.trainer_group import TrainerGroup
from megarl.rollout.protocol import EngineMemory
from megatron_ext.device_memory import ALL_PARTS, CountedMemory, StatePart

Group: TypeAlias = TrainerGroup | EngineGroup
Turn: TypeAlias = Literal["engines", "trainers", "refit"]


class _Held(NamedTuple):
    """Parts of their memory that trainers and engines hold.

    Example: _Held(trainers=frozenset({"weights"}), engines=frozenset({"weights"}))
    """

    trainers: frozenset[StatePart]
    engines: frozenset[EngineMemory]


_HELD: Mapping[Turn, _Held] = {
    "engines": _Held(frozenset(), frozenset(get_args(EngineMemory))),
    "trainers": _Held(frozenset(ALL_PARTS), frozenset()),
    "refit": _Held(frozenset({"weights"}), frozenset({"weights"})),
}


class Turns:
    """Trainers and engines with GPUs of their own: it is always everyone's turn."""

    are_taken = False
    """Whether one has to wait for another."""

    def add(self, group: Group) -> None:
        """Let a group take part, whose processes have just made what they hold, in its turn."""

    def give_to(self, group: Group) -> None:
        """Let the ranks of a model, or the engines, have the GPUs that they share, if they share any."""

    def begin_refit(self) -> None:
        """Let ranks and engines have their weights, for these to be copied; where turns are taken, one engine is up."""

    def end_step(self) -> dict[str, float]:
        """Metrics of the turns since the last step."""
        return {}


class TurnsOnSharedGpus(Turns):
    """Takes the GPUs from one side and gives them to the other. The engines begin; nothing has been made yet.

    `engines` share them with the roles of the names `sharing`; `memory` counts where there are no GPUs.
    """

    are_taken = True

    def __init__(self, engines: EngineGroup, sharing: Collection[str], memory: CountedMemory | None) -> None:
        self._engines, self._sharing, self._memory = engines, frozenset(sharing), memory
        self._trainers: list[TrainerGroup] = []
        self._turn: Turn = "engines"
        self._peaks: dict[Turn, int] = defaultdict(int)
        self._seconds = 0.0

    def add(self, group: Group) -> None:
        """See `Turns.add`."""
        if not self._shares(group):
            return
        if self._memory is not None:
            group.count_memory(self._memory)
        if isinstance(group, TrainerGroup):
            self._trainers.append(group)
            # The engines' turn, before there was anybody to ask, is none of the trainers' peak.
            group.take_device_peak()

    def give_to(self, group: Group) -> None:
        """See `Turns.give_to`."""
        if self._shares(group):
            self._change("trainers" if isinstance(group, TrainerGroup) else "engines")

    def begin_refit(self) -> None:
        """See `Turns.begin_refit`."""
        while not self._engines.up:
            # A new one takes its memory when it starts, more than a refit leaves.
            self._change("engines")
            self._engines.wait_for_one()
        self._change("refit")

    def end_step(self) -> dict[str, float]:
        """See `Turns.end_step`."""
        self._note_peak()
        metrics = {f"memory/{turn}": float(peak) for turn, peak in self._peaks.items()}
        metrics["seconds/turns"] = self._seconds
        self._peaks, self._seconds = defaultdict(int), 0.0
        return metrics

    def _shares(self, group: Group) -> bool:
        return not isinstance(group, TrainerGroup) or group.name in self._sharing

    def _change(self, turn: Turn) -> None:
        if turn == self._turn:
            return
        started = time.monotonic()
        self._note_peak()
        before, after = _HELD[self._turn], _HELD[turn]
        # Memory is given back first, then taken.
        if leaving := before.trainers - after.trainers:
            for group in self._trainers:
                group.offload(leaving)
        kept = before.engines
        if kept - after.engines:
            # An engine sleeps as a whole.
            self._engines.sleep()
            kept = frozenset()
        for group in self._trainers:
            # What the turn before held is none of the peak of the next.
            group.take_device_peak()
        if coming := after.trainers - before.trainers:
            for group in self._trainers:
                group.reload(coming)
        if waking := after.engines - kept:
            self._engines.wake_up(waking)
        self._turn = turn
        self._seconds += time.monotonic() - started

    def _note_peak(self) -> None:
        for group in self._trainers:
            self._peaks[self._turn] = max(self._peaks[self._turn], group.take_device_peak())
