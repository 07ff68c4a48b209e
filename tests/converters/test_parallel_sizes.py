import json
import subprocess
import sys

import pytest

from converters.errors import UserError
from converters.layouts.parallel_sizes import ParallelSizes, RankCoordinates

# Layers, PP, VPP, layers in the first and in the last stage.
PIPELINES = [
    (4, 1, None, None, None),
    (4, 2, None, None, None),
    (8, 2, 4, None, None),
    (8, 2, 2, None, None),
    (12, 3, 2, None, None),
    (7, 3, None, 1, None),
    (7, 3, None, None, 3),
    (7, 3, None, 2, 4),
    (5, 2, None, 4, 1),
    (61, 8, None, None, 5),
    (20, 4, 2, 2, 6),
    (14, 3, 2, 2, None),
]

# Run in a process of its own: a process that imports megatron must prepare for the device first.
MEGATRON = """
import json, sys
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
answer = []
for layers, pp, vpp, first, last in json.loads(sys.argv[1]):
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
        num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    for rank in range(pp):
        for chunk in range(vpp or 1):
            stage = chunk if vpp else None
            start = get_transformer_layer_offset(config, stage, rank)
            answer.append([start, start + get_num_layers_to_build(config, stage, rank)])
print(json.dumps(answer))
"""


def test_layers_are_where_megatron_puts_them():
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON, json.dumps(PIPELINES)]
    megatron = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    ours = []
    for layers, pp, vpp, first, last in PIPELINES:
        sizes = ParallelSizes(
            world_size=pp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        chunks = [sizes.layers(layers, rank, chunk) for rank in range(pp) for chunk in range(vpp or 1)]
        assert sorted(layer for chunk in chunks for layer in chunk) == list(range(layers))
        ours += [[chunk.start, chunk.stop] for chunk in chunks]
    assert ours == megatron


def test_ranks_are_in_megatrons_order():
    sizes = ParallelSizes(
        world_size=16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    assert sizes.data_parallel_size == 4
    assert sizes.coordinates(0) == RankCoordinates(tensor=0, context=0, pipeline=0, expert=0, expert_tensor=0)
    assert sizes.coordinates(3) == RankCoordinates(tensor=1, context=0, pipeline=0, expert=3, expert_tensor=0)
    assert sizes.coordinates(5) == RankCoordinates(tensor=1, context=0, pipeline=0, expert=1, expert_tensor=0)
    assert sizes.coordinates(14) == RankCoordinates(tensor=0, context=0, pipeline=1, expert=2, expert_tensor=0)
    assert [sizes.data_parallel_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [rank for rank in range(16) if sizes.holds_predictions(rank)] == [8, 10, 12, 14]


def test_ranks_that_share_sequences_are_in_megatrons_order():
    sizes = ParallelSizes(
        world_size=16, tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2
    )
    assert sizes.data_parallel_size == 2
    assert sizes.coordinates(3) == RankCoordinates(tensor=1, context=1, pipeline=0, expert=0, expert_tensor=1)
    assert sizes.coordinates(12) == RankCoordinates(tensor=0, context=0, pipeline=1, expert=0, expert_tensor=0)
    assert [sizes.data_parallel_rank(rank) for rank in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [rank for rank in range(16) if sizes.holds_predictions(rank)] == [8, 12]


def test_expert_tensor_parallelism_is_that_of_the_dense_layers_unless_set():
    sizes = ParallelSizes(world_size=8, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    assert sizes.expert_tensor_size == 2
    assert sizes.coordinates(3) == RankCoordinates(tensor=1, context=0, pipeline=0, expert=1, expert_tensor=1)


def test_vocabulary_is_padded_to_a_multiple_of_tensor_parallelism():
    sizes = ParallelSizes(world_size=4, tensor_model_parallel_size=4)
    assert [sizes.padded_vocabulary(size) for size in (1, 4, 65, 68)] == [4, 4, 68, 68]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size is 0"),
        ({"world_size": 3, "tensor_model_parallel_size": 2}, "3 ranks .* by tensor_model.* or use 2 or 4 ranks"),
        (
            {"world_size": 6, "tensor_model_parallel_size": 2, "context_parallel_size": 2},
            "6 ranks cannot be divided by tensor_model_parallel_size x context_parallel_size x pipeline_model_parallel"
            "_size = 2 x 2 x 1",
        ),
        ({"world_size": 2, "expert_model_parallel_size": 4}, "2 ranks .* by expert_model.* or use 4 ranks"),
        (
            {"world_size": 2, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
            r"2 ranks .* by expert_model_parallel_size x expert_tensor_parallel_size \(not set: as tensor_model_"
            r"parallel_size\) x pipeline_model_parallel_size = 2 x 2 x 1; .* 4 ranks",
        ),
        (
            {"world_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
            "2 ranks .* by expert_model_parallel_size x expert_tensor_parallel_size x pipeline_model_.* = 2 x 2 x 1;",
        ),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual stages need at least 2 pipeline stages"),
        ({"num_layers_in_first_pipeline_stage": 2}, "they need at least 2 pipeline stages"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        ParallelSizes(**sizes)


@pytest.mark.parametrize(
    ("layers", "sizes", "message"),
    [
        (5, {}, "5 of the 5 layers .* cannot be shared out evenly to 2 pipeline stages; .* to is 1 or 5"),
        (
            4,
            {"num_layers_in_first_pipeline_stage": 5},
            r"the first .* \(num_layers_in_first_.* = 5\) takes 5 of the 4 layers .* left for 1 more; lower it",
        ),
        (
            6,
            {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2},
            "the first and the last pipeline stage .*_stage = 1, .*_stage = 2.* take 3 of the 6 layers .*; give them 6",
        ),
        (
            3,
            {"num_layers_in_first_pipeline_stage": 9, "num_layers_in_last_pipeline_stage": 9},
            "take 18 of the 3 layers .* there is no other stage; give them 3 together$",
        ),
        (
            6,
            {
                "world_size": 4,
                "pipeline_model_parallel_size": 4,
                "num_layers_in_first_pipeline_stage": 3,
                "num_layers_in_last_pipeline_stage": 3,
            },
            "take 6 of the 6 layers .* none are left for 2 more; lower them or pipeline_model_parallel_size$",
        ),
        (6, {"virtual_pipeline_model_parallel_size": 2}, "stage of 3 layers cannot be cut into 2 chunks.* is 1 or 3"),
        (
            1,
            {"num_layers_in_first_pipeline_stage": 1},
            "takes 1 of the 1 layers .* none are left for 1 more; lower it or pipeline_model_parallel_size$",
        ),
        (3, {"num_layers_in_last_pipeline_stage": 3}, "the last pipeline stage .* takes 3 of the 3 layers"),
    ],
)
def test_layers_that_cannot_be_shared_out_are_refused(layers, sizes, message):
    with pytest.raises(UserError, match=message):
        ParallelSizes(**{"world_size": 2, "pipeline_model_parallel_size": 2, **sizes}).layers_of_stages(layers)
