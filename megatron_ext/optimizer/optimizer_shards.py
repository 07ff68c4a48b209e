"""The optimizer state as boxes of global tensors: saved without gathering it, and read at any layout.

For each weight, the distributed optimizer keeps the state of a range of elements; concatenated, these ranges are one
data-parallel rank's part of a buffer. With FSDP2 the range is that of some rows, which are also the rank's part of the
weight itself. A range consists of a few boxes of the weight, so each rank writes and reads its own part in place.

megarl's checkpoints have the keys of megatron-core's format "fully_reshardable" (`optimizer.state.exp_avg.KEY`), for
which megatron-core itself gathers whole buffers first. Its other formats are tied to the layout, or were removed in
0.16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from converters.boxes import boxes_of_range
from megatron_ext import compat
from megatron_ext.optimizer import hybrid_optimizer
from megatron_ext.optimizer.fully_sharded import first_element, is_cut, own_rows

FORMAT = "fully_reshardable"
"""Megatron's name for the format in which the state has the keys and shapes of the weights."""
PREFIX = "optimizer.state."
"""Prefix of the keys, before the kind of state and the key of the weight."""

_NO_STATE = ("step", "master_param")
"""Entries that are not state of a single parameter: the common step count, and a copy of the main parameter."""


@dataclass(frozen=True)
class MainState:
    """The optimizer state for the elements of one weight from index `start` on."""

    part: MegatronOptimizer
    weight: torch.nn.Parameter
    start: int
    tensors: Mapping[str, Tensor]
    """Kind (`param` for the main parameter, `exp_avg`, ...) -> elements, flat.

    They are the optimizer's own tensors, except where it stores scaled values: these are copies in fp32.
    """
    is_own: bool
    """Whether no other data-parallel rank has the state of these elements."""


def main_states(optimizer: MegatronOptimizer) -> list[MainState]:
    """The state of this rank's weights; requires `compat.prime_optimizer_state`."""
    return [
        MainState(
            part,
            weight,
            start,
            {name: own_rows(tensor).detach().view(-1) for name, tensor in tensors.items()},
            is_own=isinstance(part, DistributedOptimizer) or is_cut(weight),
        )
        for part in compat.parts(optimizer)
        for weight, start, tensors in _main_tensors(part)
    ]


def sharded_states(states: Sequence[MainState], weights: Mapping[int, ShardedBase]) -> list[ShardedTensor]:
    """Checkpoint entries for `states`; `weights` maps the `id` of each weight to the weight's own entry."""
    return [
        shard
        for state in states
        for name, flat in state.tensors.items()
        for shard in shards(
            weights[id(state.weight)], state.start, flat, prefix=f"{PREFIX}{name}.", is_own=state.is_own
        )
    ]


def shards(
    weight: ShardedBase, start: int, elements: Tensor, *, prefix: str = "", is_own: bool
) -> Iterator[ShardedTensor]:
    """Checkpoint entries for flat `elements`, from index `start` of `weight` on: boxes of the weight's saved tensors.

    Their keys begin with `prefix`. With `is_own`, no other data-parallel rank has these elements.
    """
    for offset, piece in _pieces(weight):
        first, end = max(start, offset), min(start + len(elements), offset + piece.data.numel())
        if first < end:
            pipeline, tensor, data = piece.replica_id
            replica = (pipeline, tensor, 0 if is_own else data)
            yield from _boxes(
                f"{prefix}{piece.key}", elements[first - start : end - start], first - offset, piece, replica
            )


def _main_tensors(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, Tensor]]]:
    """Each weight of an optimizer, the index of its first element here, and the state of its elements."""
    if isinstance(part, DistributedOptimizer):
        for of_buffer in part.gbuf_ranges:
            for of_bucket in (bucket for buckets in of_buffer.values() for bucket in buckets):
                for weight, ranges in of_bucket["param_map"].items():
                    tensors = _tensors_of(part, weight)
                    yield weight, ranges["param"].start, {k: v for k, v in tensors.items() if k not in _NO_STATE}
        return
    for weight, main in _pairs(part):
        state = part.optimizer.state[main]
        yield (
            weight,
            first_element(weight),
            {"param": main, **{name: each for name, each in state.items() if name != "step"}},
        )


def _tensors_of(part: DistributedOptimizer, weight: torch.nn.Parameter) -> dict[str, Tensor]:
    """The state of a weight, and its main parameter: the optimizer's own tensors, or fp32 copies of scaled ones.

    megatron-core would also return fp32 copies of bf16 state, twice as large. All of them would be on the device at the
    same time as the passes that run during a save in the background.
    """
    inner = part.optimizer
    if not part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 or isinstance(inner, HybridDeviceOptimizer):
        return part._get_main_param_and_optimizer_states(weight)
    group, number = part.model_param_group_index_map[weight]
    main = inner.param_groups[group]["params"][number]
    tensors = {
        name: kept if inner.name_to_dtype_map[name] == torch.bfloat16 else inner.get_unscaled_state(main, name)
        for name, kept in inner.state[main].items()
    }
    return {"param": tensors.pop("master_param"), **tensors}


def _pairs(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Each weight with its main parameter, for an optimizer that is not distributed."""
    main_of: dict[int, torch.nn.Parameter] = {}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for weights, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            main_of |= {id(main): weight for weight, main in zip(weights, mains, strict=True)}
    for group in part.optimizer.param_groups:
        yield from ((main_of.get(id(main), main), main) for main in group["params"])


def _boxes(
    key: str, elements: Tensor, start: int, piece: ShardedTensor, replica: tuple[int, ...]
) -> Iterator[ShardedTensor]:
    """Boxes of the tensor `key` for the `elements` of `piece` from index `start` on."""
    leading = piece.prepend_axis_num
    origin, position = piece.global_offset, 0
    for box in boxes_of_range(piece.local_shape, start, start + len(elements)):
        shape = (1,) * leading + box.shape
        within = (0,) * leading + box.start
        yield ShardedTensor(
            key,
            elements[position : position + box.size].view(shape),
            elements.dtype,
            shape,
            piece.global_shape,
            tuple(a + b for a, b in zip(origin, within, strict=True)),
            axis_fragmentations=None,
            replica_id=replica,
            allow_shape_mismatch=piece.allow_shape_mismatch,
        )
        position += box.size


def _pieces(weight: ShardedBase) -> list[tuple[int, ShardedTensor]]:
    """The tensors that a weight is saved as, each with the index of its first element in the weight.

    Gate and up projections are one weight here, and its halves are not adjacent in the global tensor.
    """
    if not isinstance(weight, ShardedTensorFactory):
        return [(0, weight)]
    pieces = list(nested_values(weight.build()))
    for piece in pieces:
        if (
            not piece.data.is_contiguous()
            or piece.data.untyped_storage()._cdata != weight.data.untyped_storage()._cdata
        ):
            raise NotImplementedError(f"{weight.key} is saved as copies, not as parts in one piece, of what it is")
    return [(piece.data.storage_offset() - weight.data.storage_offset(), piece) for piece in pieces]


def take_over(states: Sequence[MainState]) -> None:
    """Pass what was loaded into the tensors of `main_states` to optimizers that do not compute with them."""
    for part in {id(state.part): state.part for state in states}.values():
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            hybrid_optimizer.take_over(part.optimizer)
        elif part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            for state in (state for state in states if state.part is part):
                # bf16 tensors are the optimizer's own, and Transformer Engine only accepts fp32 values for them.
                copies = {name: tensor for name, tensor in state.tensors.items() if tensor.dtype != torch.bfloat16}
                part._set_main_param_and_optimizer_states(state.weight, copies)
