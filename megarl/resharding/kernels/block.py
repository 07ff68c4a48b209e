"""Block: what kernels move at once between a bucket and this rank's tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megarl.resharding.kernels.launch_table import LaunchTable
from megarl.resharding.kernels.moves import Moves
from megarl.resharding.kernels.quantised import Quantised


@dataclass(frozen=True)
class Block:
    """Neighbouring boxes of a message: `packed` are views of `memory` (uint8), `local` of this rank's tensors.

    Example: the first MiB of a message: `memory` uint8 [1_048_576], 16 `packed` views of it, 16 `local` views of the
    parameters in `names`.
    """

    memory: Tensor
    packed: list[Tensor]
    """In the order in which they lie there."""
    local: list[Tensor]
    names: Sequence[str]
    """Names of the local tensors."""
    quantised: Sequence[Quantised] = ()

    @cached_property
    def moves(self) -> Moves:
        """The block as machine code of the host reads it, made when it is first needed."""
        return Moves.of(self.memory, self.packed, self.local)

    @cached_property
    def table(self) -> LaunchTable:
        """The block as a kernel on a GPU reads it, made when it is first needed."""
        return LaunchTable(self.memory, self.packed, self.local, self.quantised)
