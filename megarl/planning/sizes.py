"""Enumerates sizes of trainer and engines: every cut of a model over a number of GPUs that its shapes allow."""

from collections.abc import Iterator
from math import ceil

from converters.architectures import Architecture
from converters.errors import UserError
from converters.layouts.cuts import ENGINES
from converters.layouts.megatron import check_divisible
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.refit import engine_sizes

_CONTEXT = (1, 2, 4, 8)
_MOST_STAGES = 32


def trainer_sizes(
    architecture: Architecture,
    world: int,
    tensor: int,
    pipeline: int,
    context: int,
    expert: int,
    *,
    fully_sharded: bool = False,
) -> ParallelSizes:
    """Sizes on `world` ranks; experts are whole unless `fully_sharded` (FSDP2).

    If layers cannot be divided evenly, the first and the last stage have fewer. Raises UserError if the model or the
    ranks cannot be cut like this.
    """
    first, last = stage_ends(architecture.num_layers, pipeline)
    sizes = ParallelSizes(
        world_size=world,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1 if architecture.num_experts and not fully_sharded else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        use_torch_fsdp2=fully_sharded,
    )
    check_divisible(architecture, sizes)
    return sizes


def stage_ends(layers: int, stages: int) -> tuple[int | None, int | None]:
    """The layers of the first and the last stage; None if all stages have equally many."""
    if layers % stages == 0:
        return None, None
    middle = ceil(layers / stages)
    left = layers - middle * (stages - 2)
    return (ceil(left / 2), left // 2) if left >= 2 else (None, None)


def all_trainer_sizes(
    architecture: Architecture, world: int, gpus_per_node: int, *, fully_sharded: bool = False
) -> Iterator[ParallelSizes]:
    """Sizes on `world` ranks, with tensor parallelism inside a node and context parallelism from 1 to 8."""
    for tensor in _powers(gpus_per_node):
        for pipeline in _divisors(world // tensor, min(_MOST_STAGES, architecture.num_layers)):
            for context in _CONTEXT:
                for expert in _powers(world if architecture.num_experts else 1):
                    try:
                        yield trainer_sizes(
                            *(architecture, world, tensor, pipeline, context, expert), fully_sharded=fully_sharded
                        )
                    except UserError:
                        continue


def all_engine_sizes(architecture: Architecture, gpus: int, gpus_per_node: int) -> Iterator[ParallelSizes]:
    """Sizes of engines that fill `gpus` evenly: experts cut like attention, or whole with attention in groups."""
    for tensor in _powers(min(gpus, 4 * gpus_per_node)):
        # Distributing whole experts over a single rank is the same as not distributing them.
        experts = [each for each in _powers(gpus) if each >= max(2, tensor)] if architecture.num_experts else []
        for expert in (None, *experts):
            try:
                sizes = engine_sizes(tensor, expert)
                check_divisible(architecture, sizes, ENGINES)
            except UserError:
                continue
            if gpus % sizes.world_size == 0:
                yield sizes


def _divisors(number: int, largest: int) -> list[int]:
    return [each for each in range(1, largest + 1) if number % each == 0]


def _powers(largest: int) -> list[int]:
    return [2**power for power in range(largest.bit_length()) if 2**power <= largest]
