"""Workers of vLLM that are built without memory, against real ones."""

import pytest
import torch
from traced_layouts import different

from converters.architectures import read_architecture
from converters.layouts.megatron import ParallelSizes
from converters.layouts.traced_layout import untraced
from converters.number_formats import FP8_BLOCK, MXFP8, NVFP4
from megarl.planning.memory.engine import engine_activation_bytes, expert_workspace_bytes
from megarl.quickstart.tiny_models import IN_BLOCKS
from megarl.rehearsal.alive import Alive
from megarl.rollout.vllm.kind import VLLM


def _built(rank, shapes, dtypes):
    """The trace, and bytes of weights, of a model that is there."""
    from megarl.rollout.vllm.rehearsal import held_bytes
    from megarl.rollout.vllm.tracing import trace_model

    return trace_model(rank.model, rank.config.model_config, shapes, dtypes), held_bytes(rank.model)


def _rehearsed(config, arguments, shapes, dtypes):
    from megarl.rollout.vllm.rehearsal import rehearse_workers

    return rehearse_workers(config, {"max_model_len": 128, **arguments}, shapes, dtypes)


# Layers that are alike, and two kinds of them; sizes that fit blocks.
MANY = {
    "qwen3_moe": {**IN_BLOCKS["qwen3_moe"], "num_key_value_heads": 8, "num_hidden_layers": 3},
    "deepseek_v3": IN_BLOCKS["deepseek_v3"],
}


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "expert_parallel", "number_format"),
    [
        ("qwen3_moe", 2, True, FP8_BLOCK),
        pytest.param("qwen3_moe", 2, False, None, marks=pytest.mark.long),
        ("deepseek_v3", 2, True, None),
        pytest.param("llama", 2, False, None, marks=pytest.mark.long),
        # Attention multiplies by weights that are derived from codes.
        ("deepseek_v3", 1, False, FP8_BLOCK),
        ("deepseek_v3", 1, False, MXFP8),
        pytest.param("qwen3_moe", 2, True, NVFP4, marks=pytest.mark.long),
        pytest.param("deepseek_v3", 1, False, NVFP4, marks=pytest.mark.long),
    ],
)
def test_rehearsed_workers_hold_what_real_ones_do(
    ranks, tiny_config, name, tensor_parallel, expert_parallel, number_format
):
    folder, config = tiny_config(name, **MANY.get(name, {}))
    architecture = read_architecture(config)
    shapes, dtypes = architecture.hf_shapes, architecture.hf_dtypes(torch.float32)
    arguments = {"tensor_parallel_size": tensor_parallel, "enable_expert_parallel": expert_parallel}
    if number_format:
        shapes, dtypes = number_format.checkpoint(architecture, dtypes)
        arguments = VLLM.quantised(arguments, number_format, architecture)
    real = ranks(_built, folder, arguments, shapes, dtypes)
    rehearsed = ranks.alone(_rehearsed, config, arguments, shapes, dtypes)
    assert [each.weights for each in rehearsed] == [weights for _, weights in real]
    for each, (trace, _) in zip(rehearsed, real, strict=True):
        assert untraced([each.trace]).keys() == untraced([trace]).keys()
        # Its codes share a byte.
        assert untraced([trace]) == {} or number_format is NVFP4
        assert placed(each.trace) == placed(trace)
        assert each.trace.dtypes == trace.dtypes
    layer = architecture.num_layers * torch.float32.itemsize
    heads = config["head_dim"] * config["num_key_value_heads"]
    width = 576 if name == "deepseek_v3" else 2 * heads // tensor_parallel
    assert {each.token for each in rehearsed} == {layer * width}


def placed(trace):
    """All that a trace says of places, in no order."""
    padding = zip(trace.shard.padding, trace.padding_values, strict=True)
    return set(trace.shard.placements), set(padding), dict(trace.shard.local_shapes)


def _same_machine(folder, arguments):
    from vllm.distributed import parallel_state

    from megarl.rollout.vllm.arguments import make_engine_config, prepare_environment
    from megarl.rollout.vllm.fake_ranks import fake_rank

    prepare_environment(arguments)
    with fake_rank(make_engine_config(folder, arguments), 1):
        return parallel_state.in_the_same_node_as(parallel_state.get_world_group().cpu_group)


def test_nothing_is_read_from_ranks_that_are_not_there(ranks, tiny_config):
    folder, _ = tiny_config("qwen3_moe")
    arguments = {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 128}
    assert ranks.alone(_same_machine, folder, arguments) == [True, True]


def test_rehearsed_workers_of_a_data_parallel_engine_share_out_experts_alone(ranks, tiny_config):
    _, config = tiny_config("qwen3_moe")
    architecture = read_architecture(config)
    arguments = {"data_parallel_size": 2, "enable_expert_parallel": True}
    workers = ranks.alone(_rehearsed, config, arguments, architecture.hf_shapes, architecture.hf_dtypes(torch.float32))
    assert [each.data_parallel for each in workers] == [0, 1]
    sizes = ParallelSizes(world_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    assert different(architecture, [each.trace for each in workers], sizes) == set()


def test_latents_in_fp8_are_counted_though_vllm_has_none_on_a_cpu(ranks, tiny_config):
    _, config = tiny_config("deepseek_v3")
    architecture = read_architecture(config)
    given = {"kv_cache_dtype": "fp8"}, architecture.hf_shapes, architecture.hf_dtypes(torch.float32)
    (worker,) = ranks.alone(_rehearsed, config, *given)
    assert worker.token == architecture.num_layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"])


def _prefilled(rank, tokens):
    """Peak bytes of the tensors of a prefill, as vLLM makes one to see how much memory it needs."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.activation import SiluAndMul

    for module in rank.model.modules():
        if isinstance(module, SiluAndMul):
            # A GPU's operator, which is there on a CPU, too; that of a CPU keeps one more tensor.
            module.op, module._forward_method = torch.ops._C.silu_and_mul, module.forward_cuda
        # Tensors inside of an operator are not seen.
        if hasattr(module, "use_direct_call"):
            module.use_direct_call = True
    alive = Alive(torch.Tensor)
    with torch.inference_mode(), set_forward_context(None, rank.config, num_tokens=tokens), alive:
        rank.model(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens))
    return alive.peak


@pytest.mark.parametrize(
    ("name", "fields", "tensor_parallel"),
    [
        ("llama", {"intermediate_size": 1536}, 1),
        pytest.param("llama", {"intermediate_size": 1536}, 2, marks=pytest.mark.long),
        # No layer has experts.
        ("deepseek_v3", {"first_k_dense_replace": 3}, 1),
    ],
)
def test_a_prefill_has_the_width_of_a_layer(ranks, tiny_config, name, fields, tensor_parallel):
    folder, config = tiny_config(name, **fields)
    architecture, tokens = read_architecture(config), 512
    # With so many sequences there is room for as much context as with sequences of 8,192 tokens.
    arguments = {"max_num_seqs": 1024, "enforce_eager": True, "dtype": "bfloat16"}
    arguments["tensor_parallel_size"] = tensor_parallel
    counted = engine_activation_bytes(architecture, tokens, tensor_parallel, 1, 1)
    counted -= expert_workspace_bytes(architecture, tokens, 1)
    found = ranks(_prefilled, folder, arguments, tokens)
    assert found == pytest.approx([counted] * tensor_parallel, rel=0.1)
