"""A rank's place in each kind of parallelism, as Megatron has it."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core import parallel_state


@dataclass(frozen=True)
class ParallelRank:
    """A rank's place in each kind of parallelism."""

    data: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    is_last_stage: bool
    """Whether logits come out here."""


def parallel_rank() -> ParallelRank:
    """This rank's place; call after `initialize`."""
    return ParallelRank(
        data=parallel_state.get_data_parallel_rank(),
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )


def share_of(micro_batches: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The sequences of a rank's micro-batches, and these by the places that they have in the rank's own batch."""
    own = [sequence for each in micro_batches for sequence in each]
    return own, [[own.index(sequence) for sequence in each] for each in micro_batches]
