"""Block: the unit that kernels move between a bucket and this rank's tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megarl.resharding.kernels.launch_table import LaunchTable
from megarl.resharding.kernels.moves import Moves, Rule, is_known, rule_of, table_of_rows, with_matrices
from megarl.resharding.kernels.quantised import Quantised


@dataclass(frozen=True)
class Block:
    """Neighbouring boxes of a message: `packed` are views of `memory` (uint8), `local` of this rank's tensors.

    Example: the first MiB of a message: `memory` uint8 [1_048_576], 16 `packed` views of it, 16 `local` views of the
    parameters in `names`.
    """

    memory: Tensor
    packed: list[Tensor]
    """In the order of the memory."""
    local: list[Tensor]
    names: Sequence[str]
    """Names of the local tensors."""
    quantised: Sequence[Quantised] = ()
    """Matrices that are quantised into the bucket; empty at the destination."""

    @cached_property
    def moves(self) -> Moves:
        """The table of rows that the host's machine code moves, in either direction; built when first needed."""
        return Moves.of(table_of_rows(self.memory, self.packed, self.local), self.memory)

    @cached_property
    def rule(self) -> Rule | None:
        """How the host's machine code quantises the block's matrices; None if it supports none of them."""
        return next(filter(None, map(rule_of, self.quantised)), None)

    @cached_property
    def moves_and_matrices(self) -> Moves:
        """The rows of `moves`, and the matrices that are quantised by `rule`."""
        known = [each for each in self.quantised if self.rule and rule_of(each) == self.rule]
        return Moves.of(with_matrices(self.moves.rows, self.memory, known), self.memory)

    @cached_property
    def in_torch(self) -> list[Quantised]:
        """The matrices that are quantised by torch on the host."""
        return [each for each in self.quantised if self.rule is None or rule_of(each) != self.rule]

    @cached_property
    def conversions(self) -> tuple[list[Tensor], list[Tensor]]:
        """The pairs of `packed` and `local` that torch copies on the host: their dtypes differ, or rows are strided."""
        pairs = zip(self.packed, self.local, strict=True)
        rest = [(there, here) for there, here in pairs if not is_known(there.dtype, here)]
        return [there for there, _ in rest], [here for _, here in rest]

    @cached_property
    def table(self) -> LaunchTable:
        """The block's table for the GPU kernel; built when first needed."""
        return LaunchTable(self.memory, self.packed, self.local, self.quantised)
