"""Elements of a rank, counted by kinds, are those of its layout; bytes of an engine are those of its formats."""

from math import prod

import pytest
from small_configs import CONFIGS

from converters.architectures import read_architecture
from converters.cost import formats
from converters.errors import UserError
from converters.layouts.engine import engine_layout
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.number_formats import FP8_BLOCK
from megarl.config.folder import known_model
from megarl.planning.memory.engine import (
    engine_memory,
    engine_weight_bytes,
    engine_weights,
    expert_workspace_bytes,
    kv_token_bytes,
)
from megarl.planning.memory.rank_weights import rank_weights
from megarl.planning.refit import engine_sizes, read_model

CUTS = {
    "one rank": ParallelSizes(),
    "TP 2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP 2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    "PP 2 in chunks of 2": ParallelSizes(
        world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    ),
    "PP 2, EP 2, ETP 1": ParallelSizes(
        world_size=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    ),
    "TP 2, DP 3, FSDP2": ParallelSizes(world_size=6, tensor_model_parallel_size=2, use_torch_fsdp2=True),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_has_as_many_elements_as_in_its_layout(name: str, cut: str) -> None:
    architecture, sizes = read_architecture(CONFIGS[name]), CUTS[cut]
    if sizes.expert_model_parallel_size > 1 and not architecture.num_experts:
        pytest.skip("no experts")
    layout = megatron_layout(architecture, sizes, module_names="local")
    # The last ranks of FSDP2 may have fewer rows.
    for rank in range(1 if sizes.use_torch_fsdp2 else sizes.world_size):
        counted = rank_weights(architecture, sizes, sizes.coordinates(rank).pipeline)
        shapes = layout.shard(rank).local_shapes
        assert counted.total == sum(map(prod, shapes.values()))
        assert counted.experts == sum(prod(shape) for each, shape in shapes.items() if ".local_experts." in each)


@pytest.mark.parametrize("tensor", [1, 8])
def test_an_engine_has_as_many_elements_as_in_its_layout(tensor: int) -> None:
    """One rank, and eight that share four heads of keys and values."""
    architecture, sizes = read_model("qwen3_235b"), engine_sizes(tensor, None)
    shapes = engine_layout(architecture, sizes).shard(0).local_shapes
    assert engine_weights(architecture, sizes).total == sum(map(prod, shapes.values()))


@pytest.mark.parametrize("sizes", [engine_sizes(8, None), engine_sizes(1, 32)], ids=["TP 8", "EP 32"])
def test_an_engine_in_fp8_has_the_bytes_of_its_formats(sizes: ParallelSizes) -> None:
    architecture = read_model("deepseek_v3")
    found = engine_memory(architecture, sizes, FP8_BLOCK, memory_bytes=141e9, utilization=0.9, prefill_tokens=8192)
    held = formats(architecture, number_format=FP8_BLOCK)
    shard = engine_layout(architecture, sizes).shard(0)
    expected = sum(held[each.hf_name].held(each.hf_box) for each in shard.placements)
    # vLLM decodes with a copy of kv_b_proj in bf16, in two parts.
    expected += 2 * sum(each.hf_box.size for each in shard.placements if each.hf_name.endswith("kv_b_proj.weight"))
    assert found.weights == pytest.approx(expected, rel=0.01)
    assert found.weights + found.working + found.kv_cache == pytest.approx(0.9 * 141e9)
    beside = engine_memory(
        architecture, sizes, FP8_BLOCK, memory_bytes=141e9, utilization=0.9, prefill_tokens=8192, computes_beside=True
    )
    assert beside.weights + beside.kv_cache == pytest.approx(0.9 * (141e9 - 3e9))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_30b_a3b"])
def test_an_engines_embedding_and_output_layer_stay_in_bf16(name: str, tensor: int, tied: bool) -> None:
    architecture = read_architecture({**known_model(name), "tie_word_embeddings": tied})
    shapes, dtypes = FP8_BLOCK.checkpoint(architecture)
    sizes = engine_sizes(tensor, None)
    found = engine_weight_bytes(architecture, sizes, FP8_BLOCK)
    held = sum(prod(shape) * dtypes[each].itemsize for each, shape in shapes.items())
    # Norms and routers stay in bf16, too, and are on every rank.
    assert found == pytest.approx(held / tensor, rel=0.003)


def test_a_latent_is_on_every_rank_and_heads_are_shared_out() -> None:
    latent, grouped = read_model("deepseek_v3"), read_model("qwen3_235b")
    one, eight = engine_sizes(1, None), engine_sizes(8, None)
    assert kv_token_bytes(latent, one) == kv_token_bytes(latent, eight) == 61 * (512 + 64) * 2
    assert kv_token_bytes(grouped, one) == 94 * 2 * 4 * 128 * 2
    # Four heads of keys: eight ranks have one each.
    assert kv_token_bytes(grouped, eight) == 94 * 2 * 128 * 2


def test_a_latent_that_is_shared_out_by_tokens_leaves_room_for_more_of_them() -> None:
    architecture, sizes = read_model("deepseek_v3"), engine_sizes(16, 16)
    whole, shared = (
        engine_memory(
            architecture,
            sizes,
            FP8_BLOCK,
            memory_bytes=80e9,
            utilization=0.9,
            prefill_tokens=16384,
            kv_ranks=ranks,
        )
        for ranks in (1, 8)
    )
    assert whole.kv_cache == shared.kv_cache
    assert shared.tokens == pytest.approx(8 * whole.tokens, abs=8)


@pytest.mark.parametrize("expert_parts", [1, 4])
@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2", "qwen3_235b", "glm_4_5"])
def test_the_rows_of_experts_are_those_of_the_kernel_of_vllm(name: str, expert_parts: int) -> None:
    triton_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.triton_moe")
    activation = pytest.importorskip("vllm.model_executor.layers.fused_moe.activation").MoEActivation.SILU
    architecture, tokens = read_model(name), 4096
    config = architecture.transformer_config
    width, hidden = config["moe_ffn_hidden_size"] // expert_parts, config["hidden_size"]
    kernel = object.__new__(triton_moe.TritonExperts)
    *workspaces, _ = kernel.workspace_shapes(
        tokens, 2 * width, hidden, config["moe_router_topk"], 0, 0, None, activation
    )
    assert expert_workspace_bytes(architecture, tokens, expert_parts) == 2 * sum(map(prod, workspaces))


def test_a_model_without_experts_has_no_rows_of_them() -> None:
    assert expert_workspace_bytes(read_model("qwen3_8b"), 4096, 1) == 0


@pytest.mark.parametrize(
    ("name", "tensor", "kv_ranks", "alike"),
    [("deepseek_v3", 8, 16, 8), ("qwen3_30b_a3b", 2, 2, 1), ("qwen3_30b_a3b", 8, 4, 2), ("deepseek_v3", 8, 3, 8)],
)
def test_tokens_are_shared_out_to_ranks_that_have_the_same(name: str, tensor: int, kv_ranks: int, alike: int) -> None:
    architecture, sizes = read_model(name), engine_sizes(tensor, None)
    with pytest.raises(UserError, match=f"attention over {tensor} ranks {alike} have the same: set it to a divisor"):
        kv_token_bytes(architecture, sizes, 2, kv_ranks)
    assert kv_token_bytes(architecture, sizes, 2, alike) == kv_token_bytes(architecture, sizes) / alike
