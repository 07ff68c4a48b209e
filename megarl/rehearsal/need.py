"""Memory that a process needs in a phase of a step, and the room on its GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Memory of a GPU, part of which is kept free for what is not counted: CUDA, NCCL and fragmentation."""

    memory: int
    kept_free: int

    @property
    def room(self) -> int:
        """Bytes available for everything that is counted."""
        return self.memory - self.kept_free

    def room_of(self, share: float) -> int:
        """The same for a process that takes `share` of the GPU, including the part kept free."""
        return round(self.memory * share) - self.kept_free


@dataclass(frozen=True)
class Need:
    """Bytes that a process needs on its GPU in a phase of a step, and the `room` for them.

    Example: Need("trainer", "update", "stages 1 to 6, 192 ranks", {"weights": 6341009408, ...}, room=76_000_000_000)
    """

    role: str
    phase: str
    who: str
    parts: Mapping[str, int]
    room: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def free(self) -> int:
        """The room that is left; negative if it does not suffice."""
        return self.room - self.total


def tightest(needs: Iterable[Need]) -> Need:
    """The need with the least room left."""
    return min(needs, key=lambda need: need.free)
