"""Demands of Megatron-LM and Megatron-Bridge on a checkpoint, by lists of theirs: megatron_lm_expectations.json."""

import argparse
import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import MODELS, content_of, convert, export, make, random_numbers, random_tensors, write_model

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.formats.torch_dist.megatron_lm import (
    Vocabulary,
    beyond_megatron_lm,
    megatron_lm_arguments,
    megatron_lm_flags,
)
from converters.formats.torch_dist.saved_arguments import check_saved_arguments, different_arguments
from converters.hf_to_megatron import FLAGS
from converters.layouts.megatron import ParallelSizes

EXPECTATIONS = json.loads(Path(__file__).with_name("megatron_lm_expectations.json").read_text())
OPTIONS: Mapping[str, Mapping[str, Any]] = EXPECTATIONS["options_of_megatron_lm_core_v0.16.1"]
COMPARED = EXPECTATIONS["compared_with_the_checkpoint_by_megatron_lm"]
ASKED_BY_BRIDGE = EXPECTATIONS["asked_of_the_checkpoint_by_megatron_bridge_0.3.1"]
YARN = {
    "rope_type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    **{name: config for name, config in MODELS.items() if name != "gemma2"},
    "moonlight with yarn": {**MODELS["moonlight"], "rope_scaling": YARN},
    "llama scaled by 8": {**MODELS["llama"], "rope_scaling": LLAMA3},
}
NOT_SAID_BY_FLAGS = {"gated_linear_unit", "activation_func", "share_embeddings_and_output_weights"}
RENAMED = {
    "num_moe_experts": "num_experts",
    "max_sequence_length": "max_position_embeddings",
    "rope_scaling": "use_rope_scaling",
}
WITHOUT_OPTIONS = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
"""Field -> the value it has in Megatron-LM, where nothing can be said about it."""


def layers(text: str) -> int | list[int]:
    """The value of --moe-layer-freq, an expression of Python, as Megatron-LM reads it."""
    if "[" not in text:
        return int(text)
    found: list[int] = []
    for run in text.strip("()").split("+"):
        values, _, count = run.partition("*")
        found += ast.literal_eval(values) * int(count)
    return found


TYPES = {"int": int, "float": float, "str": str, "moe_freq_type": layers}


def megatron_lm_parser() -> argparse.ArgumentParser:
    """A parser with those options that are about the model, as Megatron-LM declares them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, option in OPTIONS.items():
        if option["takes"] in ("true", "false"):
            action = f"store_{option['takes']}"
            parser.add_argument(option["flag"], dest=name, action=action, default=option["default"])
        else:
            parser.add_argument(
                option["flag"],
                dest=name,
                type=TYPES.get(option["takes"], str),
                default=option["default"],
                choices=option.get("choices"),
                nargs=option.get("nargs"),
            )
    return parser


def arguments_of(config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    vocabulary = Vocabulary(24, 8, Path("/there/huggingface"))
    return megatron_lm_arguments(read_architecture(config), ParallelSizes(), vocabulary, dtype)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_flags_say_all_of_the_model(name: str) -> None:
    """Megatron-LM makes of them the fields of the model, those included about which nothing is said."""
    architecture, arguments = read_architecture(CONFIGS[name]), arguments_of(CONFIGS[name])
    assert beyond_megatron_lm(architecture) is None
    parsed = vars(megatron_lm_parser().parse_args(megatron_lm_flags(arguments).split()))
    fields = {**architecture.transformer_config, **architecture.gpt_model}
    for field in fields.keys() - NOT_SAID_BY_FLAGS:
        if field in WITHOUT_OPTIONS:
            assert fields[field] == WITHOUT_OPTIONS[field], field
            continue
        found, expected = parsed[RENAMED.get(field, field)], fields[field]
        if field == "moe_router_load_balancing_type":
            expected = [expected]
        if field == "num_query_groups" and not parsed["group_query_attention"]:
            found = fields["num_attention_heads"]
        assert found == expected, field
    assert parsed["swiglu"]
    assert parsed["bf16"]
    assert parsed["untie_embeddings_and_output_weights"] is not fields["share_embeddings_and_output_weights"]
    assert parsed["padded_vocab_size"] == 24
    assert parsed["tokenizer_type"] == "HuggingFaceTokenizer"
    assert parsed["tokenizer_model"] == "/there/huggingface"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_checkpoint_says_what_its_readers_ask_in_the_types_they_take(name: str) -> None:
    arguments = arguments_of(CONFIGS[name])
    assert set(COMPARED) - arguments.keys() == set()
    # These are asked for only where they are there.
    assert set(ASKED_BY_BRIDGE) - arguments.keys() <= {"kitchen_config_file", "kitchen_recipe_number"}
    assert arguments["norm_epsilon"] == arguments["layernorm_epsilon"]
    assert arguments["apply_layernorm_1p"] == arguments["layernorm_zero_centered_gamma"]
    kinds = {"int": int, "float": int | float, "str": str, "true": bool, "false": bool}
    for argument, option in OPTIONS.items():
        value = arguments.get(argument)
        if value is not None and not option.get("nargs") and option["takes"] in kinds:
            assert isinstance(value, kinds[option["takes"]]), argument


@pytest.mark.parametrize("name", CONFIGS)
def test_arguments_that_megatron_lm_saved_are_compared_with_the_config(name: str, tmp_path: Path) -> None:
    architecture, arguments = read_architecture(CONFIGS[name]), arguments_of(CONFIGS[name])
    saved = vars(megatron_lm_parser().parse_args(megatron_lm_flags(arguments).split()))
    assert list(different_arguments(architecture, saved)) == []
    for argument, other in {"rotary_base": 77, "layernorm_epsilon": 0.5, "qk_layernorm": None, "swiglu": False}.items():
        value = not saved[argument] if other is None else other
        assert list(different_arguments(architecture, saved | {argument: value})) == [
            (argument, arguments[argument], value)
        ]
    if saved["num_experts"]:
        other = saved | {"moe_router_topk": 1, "moe_router_pre_softmax": not saved["moe_router_pre_softmax"]}
        found = [each for each, _, _ in different_arguments(architecture, other)]
        # Sigmoids of all scores are the same before the choice and after it.
        is_sigmoid = saved["moe_router_score_function"] == "sigmoid"
        assert found == ["moe_router_topk", *["moe_router_pre_softmax"] * (not is_sigmoid)]


@pytest.mark.parametrize(("factor", "found"), [(1, []), (40, ["rope_type", "rotary_scaling_factor"])])
def test_yarn_by_a_factor_of_1_is_no_scaling(factor: float, found: list[str]) -> None:
    """slime gives every model with latent attention yarn, Moonlight by a factor of 1."""
    arguments = arguments_of(MODELS["moonlight"])
    saved = arguments | {"rope_type": "yarn", "rotary_scaling_factor": factor, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert [name for name, _, _ in different_arguments(read_architecture(MODELS["moonlight"]), saved)] == found


def test_a_checkpoint_of_another_model_with_the_same_shapes_is_refused(tmp_path: Path) -> None:
    convert(make(tmp_path / "hf", "qwen3"), tmp_path / "out")
    architecture = read_architecture(MODELS["qwen3"])
    check_saved_arguments(TorchDistCheckpoint(tmp_path / "out"), architecture)
    path = tmp_path / "out/release/common.pt"
    common = torch.load(path, weights_only=False)
    common["args"].rotary_base = 77
    torch.save(common, path)
    with pytest.raises(UserError, match=r"was written by a Megatron-LM with rotary_base=77, and config.json gives \d"):
        check_saved_arguments(TorchDistCheckpoint(tmp_path / "out"), architecture)
    path.unlink()
    check_saved_arguments(TorchDistCheckpoint(tmp_path / "out"), architecture)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MODELS["gemma2"], "attention_softcap = 50.0"),
        ({**MODELS["llama"], "rope_scaling": {**LLAMA3, "factor": 32.0}}, "rope_scaling_factor = 32.0"),
        ({**MODELS["moonlight"], "rope_scaling": {**YARN, "beta_fast": 1}}, "beta_fast = 1"),
        (
            {
                **MODELS["llama"],
                "rope_theta": 10000.5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.5},
            },
            "rotary_base = 10000.5",
        ),
    ],
)
def test_a_model_that_no_flags_can_say_is_known(config: Mapping[str, Any], says: str) -> None:
    found = beyond_megatron_lm(read_architecture(config))
    assert found is not None
    assert says in found


def test_a_conversion_has_both_files(tmp_path: Path) -> None:
    plan = convert(make(tmp_path / "hf", "qwen3_first_layer_dense"), tmp_path / "out", padded_vocabulary=26)
    assert plan.beyond_megatron_lm is None
    common = torch.load(tmp_path / "out/release/common.pt", weights_only=False)["args"]
    parsed = vars(megatron_lm_parser().parse_args((tmp_path / "out" / FLAGS).read_text().split()))
    assert parsed["moe_layer_freq"] == common.moe_layer_freq == [0, 1, 1, 1]
    assert parsed["padded_vocab_size"] == common.padded_vocab_size == plan.padded_vocabulary == 26
    assert parsed["tokenizer_model"] == common.tokenizer_model == str(tmp_path / "out/huggingface")
    plan = convert(make(tmp_path / "gemma", "gemma2"), tmp_path / "gemma_out")
    assert plan.beyond_megatron_lm is not None
    assert not (tmp_path / "gemma_out" / FLAGS).exists()


@pytest.mark.parametrize(("size", "multiple"), [(17, 1), (25, 1), (None, 0)])
def test_a_padded_size_that_cannot_be_is_refused(size: int | None, multiple: int, tmp_path: Path) -> None:
    sizes = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
    folder = make(tmp_path / "hf", "qwen3")
    flag = "--make-vocab-size-divisible-by 0" if size is None else f"--padded-vocab-size {size}"
    with pytest.raises(UserError, match=flag):
        convert(folder, tmp_path / "out", sizes, padded_vocabulary=size, vocabulary_multiple=multiple)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_checkpoint_without_multi_token_prediction_is_exported_as_it_is(name: str, tmp_path: Path) -> None:
    without = {**MODELS[name], "num_nextn_predict_layers": 0}
    write_model(tmp_path / "hf", without, random_tensors(without, draw=random_numbers))
    convert(tmp_path / "hf", tmp_path / "megatron")
    write_model(tmp_path / "released", MODELS[name], {})
    plan = export(tmp_path / "megatron", tmp_path / "out", hf_config_folder=tmp_path / "released")
    assert plan.left_out_mtp_layers == MODELS[name]["num_nextn_predict_layers"]
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert content_of(tmp_path / "out") == content_of(tmp_path / "hf")


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_two_mtp", "deepseek_v3_tied", "glm4_moe"])
def test_multi_token_prediction_is_left_out_where_asked(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    tensors = random_tensors(config, draw=random_numbers)
    write_model(tmp_path / "hf", config, tensors)
    convert(tmp_path / "hf", tmp_path / "megatron", ParallelSizes(world_size=2, tensor_model_parallel_size=2))
    plan = export(tmp_path / "megatron", tmp_path / "out", without_mtp=True)
    assert plan.left_out_mtp_layers == config["num_nextn_predict_layers"]
    without = {**config, "num_nextn_predict_layers": 0}
    architecture = read_architecture(without)
    kept = {**architecture.hf_shapes, **architecture.hf_copies}
    write_model(tmp_path / "expected", without, {each: tensors[each] for each in kept if each in tensors})
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert content_of(tmp_path / "out") == content_of(tmp_path / "expected")
