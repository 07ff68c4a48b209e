"""Colocation: on GPUs that trainers and engines share, one side is offloaded before the other is reloaded.

A step has three phases. The engines hold weights and KV cache, and sample. The trainers hold weights, gradients and
optimizer states, and train. In a refit ranks and engines hold only their weights.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.rollout.protocol import EngineMemory
from megatron_ext.memory.device_memory import ALL_PARTS, CountedMemory, StatePart

Group: TypeAlias = TrainerGroup | EngineGroup
Phase: TypeAlias = Literal["engines", "trainers", "refit"]


class _Held(NamedTuple):
    """The parts of their memory that trainers and engines hold.

    Example: _Held(trainers=frozenset({"weights"}), engines=frozenset({"weights"}))
    """

    trainers: frozenset[StatePart]
    engines: frozenset[EngineMemory]


_HELD: Mapping[Phase, _Held] = {
    "engines": _Held(frozenset(), frozenset(get_args(EngineMemory))),
    "trainers": _Held(frozenset(ALL_PARTS), frozenset()),
    "refit": _Held(frozenset({"weights"}), frozenset({"weights"})),
}


class GpuSharing(Protocol):
    """Decides whether trainers or engines have their memory on the GPUs."""

    @property
    def are_shared(self) -> bool:
        """Whether one side must be offloaded before the other is reloaded."""

    def add(self, group: Group) -> None:
        """Add a group whose processes have just allocated their GPU memory."""

    def switch_to(self, group: Group) -> None:
        """Reload the ranks of a model, or the engines, after offloading everyone else on their GPUs."""

    def begin_refit(self) -> None:
        """Reload the weights of ranks and engines for a refit; on shared GPUs wait until one engine is up."""

    def end_step(self) -> dict[str, float]:
        """Metrics since the last step."""


class OwnGpus:
    """Trainers and engines have GPUs of their own: nothing is moved."""

    are_shared = False

    def add(self, group: Group) -> None:
        """See `GpuSharing.add`."""

    def switch_to(self, group: Group) -> None:
        """See `GpuSharing.switch_to`."""

    def begin_refit(self) -> None:
        """See `GpuSharing.begin_refit`."""

    def end_step(self) -> dict[str, float]:
        """See `GpuSharing.end_step`."""
        return {}


class SharedGpus:
    """Offloads the memory of one side, then reloads the other's.

    `engines` share the GPUs with the roles named in `sharing`, and use them first; nothing has been allocated yet.
    `memory` counts what is held if there are no GPUs.
    """

    are_shared = True

    def __init__(self, engines: EngineGroup, sharing: Collection[str], memory: CountedMemory | None) -> None:
        self._engines, self._sharing, self._memory = engines, frozenset(sharing), memory
        self._trainers: list[TrainerGroup] = []
        self._phase: Phase = "engines"
        self._peaks: dict[Phase, int] = defaultdict(int)
        self._seconds = 0.0

    def add(self, group: Group) -> None:
        """See `GpuSharing.add`."""
        if not self._shares(group):
            return
        if self._memory is not None:
            group.count_memory(self._memory)
        if isinstance(group, TrainerGroup):
            self._trainers.append(group)
            # Reset the peak, which includes the engines' memory from before.
            group.take_device_peak()

    def switch_to(self, group: Group) -> None:
        """See `GpuSharing.switch_to`."""
        if self._shares(group):
            self._switch("trainers" if isinstance(group, TrainerGroup) else "engines")

    def begin_refit(self) -> None:
        """See `GpuSharing.begin_refit`."""
        while not self._engines.up:
            # A starting engine allocates all its memory, more than a refit leaves free.
            self._switch("engines")
            self._engines.wait_for_one()
        self._switch("refit")

    def end_step(self) -> dict[str, float]:
        """See `GpuSharing.end_step`."""
        self._note_peak()
        metrics = {f"memory/{phase}": float(peak) for phase, peak in self._peaks.items()}
        metrics["seconds/turns"] = self._seconds
        self._peaks, self._seconds = defaultdict(int), 0.0
        return metrics

    def _shares(self, group: Group) -> bool:
        return not isinstance(group, TrainerGroup) or group.name in self._sharing

    def _switch(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        started = time.monotonic()
        self._note_peak()
        before, after = _HELD[self._phase], _HELD[phase]
        # Free memory first, then allocate.
        if leaving := before.trainers - after.trainers:
            for group in self._trainers:
                group.offload(leaving)
        kept = before.engines
        if kept - after.engines:
            # An engine can only sleep as a whole.
            self._engines.sleep()
            kept = frozenset()
        for group in self._trainers:
            # Reset the peak: memory of the previous phase must not count.
            group.take_device_peak()
        if coming := after.trainers - before.trainers:
            for group in self._trainers:
                group.reload(coming)
        if waking := after.engines - kept:
            self._engines.wake_up(waking)
        self._phase = phase
        self._seconds += time.monotonic() - started

    def _note_peak(self) -> None:
        for group in self._trainers:
            self._peaks[self._phase] = max(self._peaks[self._phase], group.take_device_peak())
