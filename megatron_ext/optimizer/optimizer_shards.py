"""The state of an optimizer as boxes of global tensors: saved without gathering it, and read at any layout.

The distributed optimizer keeps, for each weight, a range of its elements: end to end, they are one data-parallel rank's
part of a buffer; under FSDP2 it is some rows, of the weight itself, too. Such a range is a few boxes of the weight, so
that a rank writes and reads what it has, where it is.
megarl's checkpoints have the keys of megatron-core's format "fully_reshardable" (`optimizer.state.exp_avg.KEY`), for
which megatron-core itself gathers whole buffers first; its other formats are tied to the layout, or gone in 0.16.
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
"""Megatron's name for a state that has the keys and shapes of the weights."""
PREFIX = "optimizer.state."
"""Begins the keys: then comes the kind of state, and the key of the weight."""

_NO_STATE = ("step", "master_param")
"""Beside the state of a parameter: a count that all have, and a copy of the main parameter."""


@dataclass(frozen=True)
class MainState:
    """State of an optimizer for the elements of one weight from number `start` on."""

    part: MegatronOptimizer
    weight: torch.nn.Parameter
    start: int
    tensors: Mapping[str, Tensor]
    """Kind (`param` is the main parameter, `exp_avg`, ...) -> elements, flat.

    They are the optimizer's own, but for those that it keeps scaled, in fp16: these are copies in fp32.
    """
    is_own: bool
    """No other data-parallel rank has the state of these elements."""


def main_states(optimizer: MegatronOptimizer) -> list[MainState]:
    """State of this rank's weights; the optimizer is primed."""
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
    """Checkpoint entries for `states`; `weights` has, by `id` of each weight, the entry that the weight is saved as."""
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
    """The boxes that `elements`, flat and from number `start` of `weight` on, are of the tensors that it is saved as.

    `prefix` begins their keys. With `is_own` no other data-parallel rank has these elements.
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
    """Each weight of an optimizer, which of its elements come first, and their state."""
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
    """State of a weight and its main parameter: megatron-core's own, or in fp32 where they are kept with a scale.

    megatron-core gives fp32 copies of what is kept in bf16, too: all of them would be on the device at once, beside the
    passes that a save in the background lets begin, twice as large as what they are copies of.
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
    """Each weight, and the main parameter that stands for it in an optimizer that is not distributed."""
    main_of: dict[int, torch.nn.Parameter] = {}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for weights, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            main_of |= {id(main): weight for weight, main in zip(weights, mains, strict=True)}
    for group in part.optimizer.param_groups:
        yield from ((main_of.get(id(main), main), main) for main in group["params"])


def _boxes(
    key: str, elements: Tensor, start: int, piece: ShardedTensor, replica: tuple[int, ...]
) -> Iterator[ShardedTensor]:
    """Boxes of the tensor `key` for the `elements` of `piece` from number `start` on."""
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
    """The tensors that a weight is saved as, each with the number of its first element in the weight.

    Gate and up projection are one weight, whose two halves lie apart in the whole.
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
    """Let optimizers that do not compute with the tensors of `main_states` take over what was loaded into them."""
    for part in {id(state.part): state.part for state in states}.values():
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            hybrid_optimizer.take_over(part.optimizer)
        elif part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            for state in (state for state in states if state.part is part):
                # In bf16 they are the optimizer's own, for which Transformer Engine takes no others than in fp32.
                copies = {name: tensor for name, tensor in state.tensors.items() if tensor.dtype != torch.bfloat16}
                part._set_main_param_and_optimizer_states(state.weight, copies)
