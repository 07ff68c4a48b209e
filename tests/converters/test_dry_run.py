"""A conversion planned from config.json alone is the one that is then carried out."""

import json

import pytest
import torch
from conversions import MODELS, convert, make

from converters.dry_run import plan_from_config
from converters.errors import UserError
from converters.layouts.megatron import ParallelSizes

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def plan(folder, dtype="keep", sizes=None):
    return plan_from_config(folder, sizes or ParallelSizes(), dtype=dtype, vocabulary_multiple=16)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_tied", "gemma2"])
def test_it_is_the_plan_of_the_conversion(name, tmp_path):
    sizes = ParallelSizes(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    folder = make(tmp_path / "model", name)
    done = convert(folder, tmp_path / "out", sizes, vocabulary_multiple=16)
    (folder / "model.safetensors").unlink()
    assert plan(folder, sizes=sizes) == done


@pytest.mark.parametrize(
    ("fields", "choice", "dtype"),
    [
        ({"torch_dtype": "float16"}, "keep", FP16),
        ({"dtype": "float32"}, "keep", FP32),
        ({}, "keep", BF16),
        ({"torch_dtype": "float32", "quantization_config": BLOCK_FP8}, "keep", BF16),
        ({"torch_dtype": "float32"}, "bf16", BF16),
        ({"torch_dtype": "bfloat16"}, "fp32", FP32),
    ],
)
def test_weights_have_the_type_of_the_config_or_the_chosen_one(fields, choice, dtype, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["deepseek_v3"], **fields}))
    tensors = plan(tmp_path, choice).contents.tensors
    kinds = {key.endswith("expert_bias"): each.dtype for key, each in tensors.items()}
    assert kinds == {False: dtype, True: FP32}


def test_an_unknown_type_and_other_quantisation_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["qwen3"], "torch_dtype": "int4"}))
    with pytest.raises(UserError, match=r"weights are in 'int4'; say --dtype bf16 or fp32"):
        plan(tmp_path)
    quantised = {**MODELS["qwen3"], "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    for choice in ("keep", "bf16"):
        with pytest.raises(UserError, match=r"quant_method = 'awq'"):
            plan(tmp_path, choice)
