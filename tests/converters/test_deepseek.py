"""The DeepSeek families, from the public fields of released configurations."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from released_configs import RELEASED
from transformers import AutoConfig

from converters.architectures import Architecture, read_architecture
from converters.architectures.extensions import Extensions
from converters.errors import UserError
from converters.layout import check_tiling
from converters.layouts.megatron import ParallelSizes, megatron_layout

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 8,
    "n_routed_experts": 16,
    "vocab_size": 32,
}


def architecture_of(name: str, **fields: Any) -> Architecture:
    return read_architecture({**RELEASED[name], **fields})


def parameters(architecture: Architecture) -> int:
    """Elements of the tensors of a checkpoint, without the router's biases."""
    released = [name for name in architecture.hf_shapes if not name.endswith("e_score_correction_bias")]
    released += [architecture.hf_copies[name] for name in architecture.exported_copies]
    return sum(math.prod(architecture.hf_shapes[name]) for name in released)


@pytest.mark.parametrize(
    ("name", "released"),
    [
        ("Kimi-K2", 1.026e12),
        ("Moonlight", 15.96e9),
        ("DeepSeek-V2-Lite", 15.706e9),
        ("DeepSeek-V2", 235.74e9),
    ],
)
def test_released_models_have_their_number_of_parameters(name: str, released: float) -> None:
    assert parameters(architecture_of(name)) == pytest.approx(released, rel=1e-3)


def test_released_deepseek_v3_has_its_number_of_parameters() -> None:
    # Parameters in FP8 and in bf16 of the released checkpoint, and the model card's 671B without the prediction layer.
    assert parameters(architecture_of("DeepSeek-V3")) == 680_571_043_840 + 3_918_786_560
    without = architecture_of("DeepSeek-V3", num_nextn_predict_layers=0)
    assert parameters(without) == pytest.approx(671.03e9, rel=1e-5)


def test_released_deepseek_v3_has_its_number_of_tensors() -> None:
    architecture = architecture_of("DeepSeek-V3")
    attention, dense, experts, shared = 9, 3, 256 * 3 + 2, 3
    main = 3 + 61 * attention + 3 * dense + 58 * (experts + shared)
    mtp = attention + experts + shared + 4
    assert len(architecture.hf_shapes) == main + mtp
    assert architecture.exported_copies == (
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
    )
    assert set(architecture.exported_copies) == architecture.hf_copies.keys()
    assert not architecture.hf_copies.keys() & architecture.hf_shapes.keys()
    assert architecture.hf_shapes["model.layers.61.eh_proj.weight"] == (7168, 2 * 7168)
    assert architecture.transformer_config["mtp_num_layers"] == 1


def test_the_router_of_deepseek_v2_lite() -> None:
    architecture = architecture_of("DeepSeek-V2-Lite")
    expected = {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 1.0,
        "moe_shared_expert_intermediate_size": 2816,
        "mscale": 0.707,
        "q_lora_rank": None,
    }
    assert {name: architecture.transformer_config[name] for name in expected} == expected
    unexpected = {"moe_router_enable_expert_bias", "moe_router_num_groups", "mtp_num_layers"}
    assert not unexpected & architecture.transformer_config.keys()
    assert torch.float32 not in architecture.hf_dtypes(torch.bfloat16).values()


@pytest.mark.parametrize(
    ("name", "changes", "groups", "scoring"),
    [
        ("DeepSeek-V2", {}, (8, 3), 1),
        ("DeepSeek-V2", {"topk_group": 6}, (8, 6), None),
        ("DeepSeek-V2", {"topk_method": "greedy"}, None, None),
        ("DeepSeek-V2", {"first_k_dense_replace": 60}, None, None),
        ("DeepSeek-V3", {}, (8, 4), None),
        ("DeepSeek-V3", {"topk_group": 2}, (8, 2), 2),
        ("DeepSeek-V3", {"topk_group": 8}, None, None),
        ("Kimi-K2", {}, None, None),
    ],
)
def test_groups_are_scored_by_another_rule_only_where_megatron_would_choose_others(
    name: str, changes: dict[str, Any], groups: tuple[int, int] | None, scoring: int | None
) -> None:
    architecture = architecture_of(name, **changes)
    fields = architecture.transformer_config
    assert (fields.get("moe_router_num_groups"), fields.get("moe_router_group_topk")) == (groups or (None, None))
    assert architecture.extensions == Extensions(experts_in_group_score=scoring)


@pytest.mark.parametrize(
    ("frequency", "first", "pattern"),
    [
        (1, 0, 1),
        (2, 0, [1, 0, 1, 0]),
        (2, 1, [0, 0, 1, 0]),
        ([0, 1, 0, 1], 0, [0, 1, 0, 1]),
        ([1] * 4, 1, [0, 1, 1, 1]),
    ],
)
def test_which_layers_have_experts(frequency: int | list[int], first: int, pattern: int | list[int]) -> None:
    fields = {**SMALL, "moe_layer_freq": frequency, "first_k_dense_replace": first}
    architecture = architecture_of("Kimi-K2", **fields)
    assert architecture.transformer_config["moe_layer_freq"] == pattern
    with_experts = {int(name.split(".")[2]) for name in architecture.hf_shapes if name.endswith("mlp.gate.weight")}
    assert with_experts == {layer for layer in range(4) if pattern == 1 or pattern[layer]}


@pytest.mark.parametrize(("frequency", "last"), [([0, 1, 0, 1], True), ([1, 1, 1, 0], False)])
def test_a_multi_token_prediction_layer_is_like_the_last_of_a_list(frequency: list[int], last: bool) -> None:
    fields = {**SMALL, "moe_layer_freq": frequency, "first_k_dense_replace": 0, "num_nextn_predict_layers": 2}
    architecture = architecture_of("DeepSeek-V3", **fields)
    for layer in (4, 5):
        assert (f"model.layers.{layer}.mlp.gate.weight" in architecture.hf_shapes) is last
        assert (f"model.layers.{layer}.mlp.down_proj.weight" in architecture.hf_shapes) is not last


@pytest.mark.parametrize("chunks", [None, 2])
def test_the_last_stage_has_every_element_of_two_prediction_layers_once(chunks: int | None) -> None:
    architecture = architecture_of("DeepSeek-V3", **SMALL, num_nextn_predict_layers=2, q_lora_rank=6)
    parallel = ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks)
    layout = megatron_layout(architecture, parallel, module_names="local")
    prefixes = ("model.layers.4.", "model.layers.5.")
    assert not any(placement.hf_name.startswith(prefixes) for placement in layout.placements(0))
    check_tiling(layout.shard(1))
    placed: Counter[str] = Counter()
    for placement in layout.placements(1):
        if placement.hf_name.startswith(prefixes):
            layer = int(placement.hf_name.split(".")[2])
            assert placement.local_name.startswith(f"{'model1.' if chunks else ''}mtp.layers.{layer - 4}.")
            placed[placement.hf_name] += placement.hf_box.size
    shapes = architecture.hf_shapes
    assert placed == {name: math.prod(shapes[name]) for name in shapes if name.startswith(prefixes)}


def test_names_of_prediction_layers_with_transformer_engine() -> None:
    architecture = architecture_of("DeepSeek-V3", **SMALL, q_lora_rank=6)
    names = megatron_layout(architecture, ParallelSizes(), module_names="te").local_shapes(0).keys()
    inner = "mtp.layers.0.transformer_layer."
    assert {
        inner + "input_layernorm.weight",
        inner + "self_attention.linear_kv_up_proj.layer_norm_weight",
        inner + "pre_mlp_layernorm.weight",
        inner + "mlp.experts.linear_fc1.weight15",
        "mtp.layers.0.final_layernorm.weight",
    } <= names


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("DeepSeek-V2", {"topk_group": 0}, "chooses 6 of 160 experts in 0 of 8 groups .* is not possible"),
        ("DeepSeek-V2", {"n_group": 0}, "chooses 6 of 160 experts in 3 of 0 groups .* is not possible"),
        ("DeepSeek-V3", {"n_group": 256, "topk_group": 8}, "best 2 experts, but its groups .* hold 1 of 256"),
        ("DeepSeek-V3", {"n_group": 7}, "chooses 8 of 256 experts in 4 of 7 groups .* is not possible"),
        ("DeepSeek-V2-Lite", {"num_experts_per_tok": 65}, "has num_experts_per_tok = 65 of 64 experts; .* at most 64"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "has norm_topk_prob = True"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "has topk_method = 'noaux_tc'"),
        ("DeepSeek-V2-Lite", {"scoring_func": "sigmoid"}, "has scoring_func = 'sigmoid'"),
        ("DeepSeek-V2-Lite", {"mlp_bias": True}, "has mlp_bias = True"),
        ("Kimi-K2", {"moe_layer_freq": [1, 0]}, "has 2 values in moe_layer_freq for 61 layers"),
        ("Kimi-K2", {"moe_layer_freq": 0}, "has moe_layer_freq = 0; it must be at least 1"),
        ("Kimi-K2", {"rope_interleave": False}, "has rope_interleave = False"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "multi-token-prediction layers that are not like its last layer"),
    ],
)
def test_what_megatron_cannot_compute_is_refused(name: str, fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        architecture_of(name, **fields)


@pytest.mark.parametrize("field", ["n_group", "topk_group", "routed_scaling_factor"])
@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2"])
def test_a_router_that_engines_would_take_for_deepseek_v3s_is_refused(name: str, field: str) -> None:
    """Left out, the field is no 1 to transformers, whose class engines use for both model types."""
    assert getattr(AutoConfig.for_model("deepseek_v3"), field) == RELEASED["DeepSeek-V3"][field] != 1
    with pytest.raises(UserError, match=f"has no field {field}, and engines would take DeepSeek-V3's: add"):
        architecture_of(name, **{field: None})
