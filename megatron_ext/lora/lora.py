"""The adapter of a Megatron linear layer: a low-rank update of the frozen weight, under any parallelism."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from converters.layout import Shape

LinearLayer: TypeAlias = Any
"""megatron-core's ColumnParallelLinear, RowParallelLinear, or a Linear replicated on all ranks."""


@dataclass(frozen=True)
class Rows:
    """The output rows of a linear layer on this rank: the number of rows per HuggingFace matrix, by the matrix's name.

    They alternate `groups` times: with 2 groups, query, key and value are q k v q k v, each with half of its rows.

    Example: Rows({"q_proj": 128, "k_proj": 64, "v_proj": 64}, groups=2)
    """

    of_matrices: Mapping[str, int]
    groups: int

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join outputs [..., rows of one matrix], one per matrix, into [..., rows of the layer]."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], dim=-1).flatten(-2)


class Factors(torch.nn.Module):
    """The A [rank, in] and B [out, rank] of one HuggingFace matrix, each whole or this rank's shard."""

    def __init__(self, shape_a: Shape, shape_b: Shape, like: Tensor) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.empty(shape_a, dtype=like.dtype, device=like.device))
        self.lora_B = torch.nn.Parameter(torch.empty(shape_b, dtype=like.dtype, device=like.device))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B. Called as a module, so that Megatron first gathers the other ranks' parts."""
        return self.lora_A, self.lora_B


class Adapter(torch.nn.ModuleDict):
    """The factors of a linear layer's adapted matrices, by name; their update is added to the layer's output.

    Tensor-parallel communication is done on the `rank` numbers per token between A and B, not on hidden states. If the
    layer gathers the tokens of all ranks, they are gathered; if it sums its output over ranks, they are summed. Experts
    do neither, as their dispatcher does; instead the gradient of the replicated factor is summed over ranks.
    """

    def __init__(
        self, linear: LinearLayer, shapes: Mapping[str, tuple[Shape, Shape]], rows: Rows, scale: float
    ) -> None:
        factors = {name: Factors(*of_matrix, linear.weight) for name, of_matrix in shapes.items()}
        super().__init__(factors)
        self._factors = factors
        """The same modules, with their type."""
        self.enabled = True
        """If False, the layer computes as without the adapter."""
        self._rows, self._scale = rows, scale
        self._is_row, self._is_column = isinstance(linear, RowParallelLinear), isinstance(linear, ColumnParallelLinear)
        self._is_expert = getattr(linear, "is_expert", False)
        self._group = linear.tp_group
        for each in factors.values():
            self._mark(each.lora_A, linear, cut_in=1 if self._is_row else None)
            self._mark(each.lora_B, linear, cut_in=0 if self._is_column else None)

    def add_to_output(
        self, linear: LinearLayer, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None] | None:
        """A forward hook of `linear`, which returns output and bias separately."""
        if not self.enabled:
            return None
        plain, bias = output
        return plain + self._update(linear, inputs[0]), bias

    @torch.no_grad()
    def update_of_weight(self) -> Tensor:
        """The update of this rank's weight, float32 [out, in]."""
        parts, first = [], next(iter(self._factors.values())).lora_A
        for name, rows in self._rows.of_matrices.items():
            if factors := self._factors.get(name):
                parts.append(factors.lora_A.float().T @ factors.lora_B.float().T)
            else:
                parts.append(torch.zeros(first.shape[1], rows, device=first.device))
        return self._rows.joined(parts).T * self._scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """As the layer's own, with each factor sharded as on this rank."""
        cut = {"lora_A": 1} if self._is_row else {"lora_B": 0} if self._is_column else {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {f"{name}.{factor}": dimension for name in self for factor, dimension in cut.items()},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )

    def _update(self, linear: LinearLayer, tokens: Tensor) -> Tensor:
        """B A applied to the tokens [..., in of this rank]: [..., rows of this rank]."""
        factors = {name: each() for name, each in self._factors.items()}
        first = torch.cat([self._alike(a, not self._is_row) for a, _ in factors.values()])
        latent = self._exchange(linear, F.linear(tokens, first) * self._scale)
        of_matrices = dict(zip(factors, latent.chunk(len(factors), dim=-1), strict=True))
        parts = [
            F.linear(of_matrices[name], self._alike(factors[name][1], self._is_row))
            if name in factors
            else latent.new_zeros(*latent.shape[:-1], rows)
            for name, rows in self._rows.of_matrices.items()
        ]
        return self._rows.joined(parts)

    def _exchange(self, linear: LinearLayer, latent: Tensor) -> Tensor:
        # Shared experts that overlap with routed ones handle their own communication, as routed ones do.
        if not getattr(linear, "sequence_parallel", False) or getattr(linear, "explicit_expert_comm", False):
            return latent
        if self._is_row:
            return reduce_scatter_to_sequence_parallel_region(latent, group=self._group)
        return gather_from_sequence_parallel_region(latent, group=self._group) if self._is_column else latent

    def _alike(self, factor: Tensor, is_alike: bool) -> Tensor:
        """Sum the gradient of an expert's factor over tensor-parallel ranks if it is replicated on them."""
        if not is_alike or not self._is_expert or self._group.size() == 1:
            return factor
        return copy_to_tensor_model_parallel_region(factor, group=self._group)

    def _mark(self, factor: torch.nn.Parameter, linear: LinearLayer, cut_in: int | None) -> None:
        """Mark over which ranks Megatron reduces the gradient, and on which the gradient norm counts it."""
        factor.allreduce = getattr(linear.weight, "allreduce", True)  # type: ignore[attr-defined]
        if cut_in is not None:
            set_tensor_model_parallel_attributes(factor, is_parallel=True, dim=cut_in, stride=1)
        elif self._is_expert:
            # Megatron would count it on TP rank 0 of the dense layers, which may have no replica or several. Marked as
            # sharded, it counts on all ranks except those marked `shared`.
            factor.tensor_model_parallel = True  # type: ignore[attr-defined]
            factor.shared = self._group.rank() != 0  # type: ignore[attr-defined]
        else:
            factor.sequence_parallel = linear.config.sequence_parallel  # type: ignore[attr-defined]
