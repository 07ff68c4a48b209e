"""A job's ranks find their places, and jobs that cannot be are refused."""

import pytest
import torch
from launch import run_ranks
from parallel_rank import ParallelRank, parallel_rank

from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes
from megatron_ext import parallel


def place(rank: int, sizes: ParallelSizes) -> ParallelRank:
    return parallel_rank()


def test_ranks_are_numbered_as_megatron_does() -> None:
    sizes = ParallelSizes(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert run_ranks(place, sizes) == [
        ParallelRank(data=0, tensor=0, context=0, pipeline=0, expert=0, is_last_stage=False),
        ParallelRank(data=0, tensor=1, context=0, pipeline=0, expert=0, is_last_stage=False),
        ParallelRank(data=0, tensor=0, context=0, pipeline=1, expert=0, is_last_stage=True),
        ParallelRank(data=0, tensor=1, context=0, pipeline=1, expert=0, is_last_stage=True),
    ]


def test_expert_parallel_ranks_are_data_parallel_ranks() -> None:
    places = run_ranks(place, ParallelSizes(world_size=2, expert_model_parallel_size=2))
    assert [(each.data, each.expert, each.is_last_stage) for each in places] == [(0, 0, True), (1, 1, True)]


def test_places_agree_with_the_weight_layout() -> None:
    sizes = ParallelSizes(
        world_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    for rank, found in enumerate(run_ranks(place, sizes)):
        expected = sizes.coordinates(rank)
        assert (found.tensor, found.pipeline, found.expert) == (expected.tensor, expected.pipeline, expected.expert)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_job_is_refused(rank: int) -> None:
    with pytest.raises(UserError, match=f"rank {rank} does not exist in a job of world_size 2"):
        parallel.initialize(ParallelSizes(world_size=2), rank, "tcp://127.0.0.1:1")
    assert not torch.distributed.is_initialized()


def initialize_for_another_size(rank: int, sizes: ParallelSizes) -> str:
    with pytest.raises(UserError) as caught:
        parallel.initialize(ParallelSizes(world_size=4), rank, "tcp://127.0.0.1:1")
    return str(caught.value)


def test_sizes_for_another_number_of_processes_are_refused() -> None:
    for message in run_ranks(initialize_for_another_size, ParallelSizes(world_size=2)):
        assert "for 4 ranks, but the job has 2" in message


def shut_down_twice(rank: int, sizes: ParallelSizes) -> bool:
    parallel.shutdown()
    parallel.shutdown()
    initialized = torch.distributed.is_initialized()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return initialized


def test_shutdown_leaves_the_job() -> None:
    assert run_ranks(shut_down_twice, ParallelSizes()) == [False]
