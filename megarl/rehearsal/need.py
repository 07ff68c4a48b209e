"""Needs of a process in a phase of a step, and the room on its GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Memory of a GPU, of which a part is kept free: for CUDA, NCCL and fragmentation, which nothing here counts."""

    memory: int
    kept_free: int

    @property
    def room(self) -> int:
        """Bytes that are there for all that is counted."""
        return self.memory - self.kept_free

    def room_of(self, share: float) -> int:
        """The same for a process that takes a share of the GPU, and finds there what is kept free."""
        return round(self.memory * share) - self.kept_free


@dataclass(frozen=True)
class Need:
    """Bytes that a process needs of its GPU in a phase of a step, and the `room` that there is for them.

    Example: Need("trainer", "update", "stages 1-6, 192 ranks", {"weights": 6341009408, "gradients": 12682002432}, 76e9)
    """

    role: str
    phase: str
    who: str
    parts: Mapping[str, int]
    room: int

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def free(self) -> int:
        """The room that is left; negative where it does not do."""
        return self.room - self.total


def tightest(needs: Iterable[Need]) -> Need:
    """The one that has least room left."""
    return min(needs, key=lambda need: need.free)
