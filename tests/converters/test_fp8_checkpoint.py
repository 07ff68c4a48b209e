"""Which tensors of a checkpoint are in block FP8, and what config.json says about it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.fp8 import is_block_fp8, quantisation_config, quantised_names, scales_of
from converters.number_formats import FP8_BLOCK

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
RELEASED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def test_the_weights_in_fp8_are_those_of_the_released_deepseek_v3(config):
    # Layer 0 is dense, 1 to 3 have experts; 4 is multi-token prediction, of which eh_proj is in bfloat16.
    names = quantised_names(read_architecture(config("deepseek_v3")))
    attention = {f"model.layers.{layer}.self_attn.{x}.weight" for layer in range(5) for x in ATTENTION}
    dense = {f"model.layers.0.mlp.{x}.weight" for x in MLP}
    experts = {
        f"model.layers.{layer}.mlp.{part}.{x}.weight"
        for layer in range(1, 5)
        for part in ("shared_experts", *(f"experts.{expert}" for expert in range(4)))
        for x in MLP
    }
    assert names == attention | dense | experts


def test_the_weights_in_fp8_are_those_of_the_released_qwen3(config):
    names = quantised_names(read_architecture(config("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0])))
    attention = {f"model.layers.{layer}.self_attn.{x}_proj.weight" for layer in range(2) for x in "qkvo"}
    dense = {f"model.layers.0.mlp.{x}.weight" for x in MLP}
    assert names == attention | dense | {f"model.layers.1.mlp.experts.{e}.{x}.weight" for e in range(4) for x in MLP}


@pytest.mark.parametrize(
    ("name", "fields"),
    [("qwen3", {}), ("qwen3", {"tie_word_embeddings": True}), ("qwen3_moe", {}), ("deepseek_v3", {})],
)
def test_transformers_makes_the_same_modules_fp8(name, fields, config):
    hf_config = config(name, **fields)
    architecture = read_architecture(hf_config)
    quantisation = FineGrainedFP8Config(**quantisation_config(architecture))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config))
    replace_with_fp8_linear(model, quantisation.modules_to_not_convert, quantisation, pre_quantized=True)
    made = {module for module, kind in model.named_modules() if isinstance(kind, FP8Linear | FP8Experts)}
    assert made == {
        name.partition(".experts.")[0] + ".experts" if ".experts." in name else name.removesuffix(".weight")
        for name in quantised_names(architecture)
        # transformers has no multi-token prediction.
        if not name.startswith("model.layers.4.")
    }


def test_the_config_of_an_export_is_read_back(config):
    written = quantisation_config(read_architecture(config("deepseek_v3")))
    assert is_block_fp8({"quantization_config": written})
    assert {field: written[field] for field in RELEASED} == RELEASED
    assert written.keys() == RELEASED.keys() | {"modules_to_not_convert"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"quantization_config": None}, False),
        ({"quantization_config": RELEASED}, True),
        ({"quantization_config": {**RELEASED, "scale_fmt": "ue8m0"}}, True),
        ({"quantization_config": {**RELEASED, "fmt": None, "modules_to_not_convert": ["lm_head"]}}, True),
    ],
)
def test_whether_a_config_says_fp8(fields, expected):
    assert is_block_fp8(fields) is expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method = 'compressed-tensors'"),
        ({"quant_method": None}, "quant_method = None"),
        ({"weight_block_size": None}, "weight_block_size = None"),
        ({"weight_block_size": [1, 128]}, r"weight_block_size = \[1, 128\].*only \[128, 128\] is"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"scale_fmt": "int"}, "scale_fmt = 'int'"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
    ],
)
def test_other_quantisations_are_refused(fields, message):
    with pytest.raises(UserError, match=f"{message}.*give the model in bf16"):
        is_block_fp8({"quantization_config": {**RELEASED, **fields}})


def test_scales_follow_their_weights(config):
    architecture = read_architecture(config("deepseek_v3", hidden_size=300))
    names = quantised_names(architecture)
    shapes, dtypes = FP8_BLOCK.with_scales(architecture.hf_shapes, architecture.hf_dtypes(BF16), names)
    weight, scales = "model.layers.0.self_attn.kv_b_proj.weight", "model.layers.0.self_attn.kv_b_proj.weight_scale_inv"
    o_proj = "model.layers.4.self_attn.o_proj.weight"
    assert list(shapes).index(scales) == list(shapes).index(weight) + 1
    assert (shapes[o_proj], shapes[o_proj + "_scale_inv"]) == ((300, 16), (3, 1))
    assert (dtypes[o_proj], dtypes[o_proj + "_scale_inv"]) == (FP8, FP32)
    assert {name for name, dtype in dtypes.items() if dtype is FP8} == names
    assert scales_of(Path("model"), shapes, dtypes) == {name: name + "_scale_inv" for name in names}
    plain = [name for name in shapes if not name.endswith("_scale_inv")]
    assert plain == list(architecture.hf_shapes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_scale_inv": None}, "model holds w in FP8 without its scales w_scale_inv"),
        ({"w_scale_inv": ((3, 2), FP32)}, r"with shape \[3, 2\], where w needs \[2, 3\]"),
        ({"w_scale_inv": ((2, 3), torch.float16)}, r"scales w_scale_inv in torch.float16"),
        ({"w": ((200, 300), BF16)}, "holds the scales w_scale_inv, but no tensor w in"),
        ({"w": None}, "holds the scales w_scale_inv, but no tensor w in"),
        ({"w": ((200, 300), torch.float8_e5m2)}, "holds w in torch.float8_e5m2"),
        ({"w": ((2, 200, 300), FP8)}, r"holds w in FP8 with shape \[2, 200, 300\]; only matrices"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together_are_refused(changes, message):
    tensors = {"w": ((200, 300), FP8), "w_scale_inv": ((2, 3), FP32), "v": ((5,), BF16), **changes}
    shapes = {name: tensor[0] for name, tensor in tensors.items() if tensor}
    dtypes = {name: tensor[1] for name, tensor in tensors.items() if tensor}
    with pytest.raises(UserError, match=message):
        scales_of(Path("model"), shapes, dtypes)
