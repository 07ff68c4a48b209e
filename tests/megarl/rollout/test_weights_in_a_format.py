"""Engines that hold the weights in a number format: what they are told, and what is refused before they start."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json
from converters.fp8 import quantisation_config
from converters.hf_to_megatron import HUGGINGFACE, convert_checkpoint
from converters.layouts.megatron import ParallelSizes
from converters.number_formats import FP8_BLOCK, NUMBER_FORMATS
from megarl.config.compose import compose
from megarl.models.auxiliary import check_auxiliary
from megarl.models.policy import check_held, read_model
from megarl.quickstart.tiny_models import IN_BLOCKS, write_tiny_model
from megarl.rollout import quantised_load
from megarl.rollout.kind import NUMBER_FORMAT
from megarl.rollout.number_format import in_number_format
from megarl.rollout.sglang.arguments import server_arguments
from megarl.run.opening import RunSetup
from megarl.schema import ModelConfig, RolloutConfig
from megatron_ext import device


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3", fields=IN_BLOCKS["qwen3"])


def test_an_engine_is_told_what_stays_in_high_precision(folder):
    config = read_json(folder / CONFIG)
    given = {"max_model_len": 64, "hf_overrides": {"head_dtype": "float32"}}
    rollout = RolloutConfig(weights="fp8_block", engine_args=given)
    arguments = in_number_format(rollout, config)
    told = arguments["hf_overrides"].pop("quantization_config")
    assert (told["quant_method"], told["modules_to_not_convert"]) == ("fp8", ["lm_head", "model.embed_tokens"])
    assert arguments == given
    assert in_number_format(RolloutConfig(engine_args=given), config) is given


@pytest.mark.parametrize(
    ("name", "bits", "strategy", "is_floating"),
    [("int8_channel", 8, "channel", False), ("mxfp8", 8, "group", True), ("nvfp4", 4, "tensor_group", True)],
)
def test_compressed_tensors_find_what_is_meant_in_what_the_engine_is_told(folder, name, bits, strategy, is_floating):
    rollout = RolloutConfig(weights=name, engine_args={"tensor_parallel_size": 2})
    arguments = in_number_format(rollout, read_json(folder / CONFIG))
    told = QuantizationConfig.model_validate(arguments["hf_overrides"]["quantization_config"])
    (scheme,) = told.config_groups.values()
    number_format = NUMBER_FORMATS[name]
    assert (scheme.targets, told.ignore) == (["Linear"], ["lm_head", "model.embed_tokens"])
    assert (scheme.weights.num_bits, scheme.weights.type) == (bits, "float" if is_floating else "int")
    assert (scheme.weights.symmetric, scheme.weights.dynamic) == (True, False)
    block = None if strategy == "channel" else number_format.block[1]
    assert (scheme.weights.strategy, scheme.weights.group_size) == (strategy, block)
    if number_format.elements_per_code > 1:
        # Activations in four bits would need scales that nobody has calibrated.
        assert scheme.input_activations is None
    else:
        assert scheme.weights.pytorch_dtype() is number_format.codes
        assert scheme.input_activations.dynamic is True


def test_what_is_read_is_quantised_on_the_device_of_the_worker(folder, monkeypatch):
    seen = []

    def tensors(name, weight):
        seen.append((weight.device.type, weight.dtype))
        yield name, weight

    recording = SimpleNamespace(quantised_names=FP8_BLOCK.quantised_names, tensors=tensors)
    monkeypatch.setattr(quantised_load, "NUMBER_FORMATS", {"recording": recording})
    # Stands for a GPU.
    monkeypatch.setattr(device, "device", lambda: torch.device("meta"))
    hf_config = SimpleNamespace(quantization_config={NUMBER_FORMAT: "recording"})
    weights = load_file(folder / "model.safetensors")
    loaded = dict(quantised_load.in_asked_format(weights.items(), folder, hf_config, torch.bfloat16))
    assert loaded.keys() == weights.keys()
    on_device = {name for name, tensor in loaded.items() if tensor.is_meta}
    assert on_device == FP8_BLOCK.quantised_names(read_architecture(read_json(folder / CONFIG)))
    assert seen == [("meta", torch.bfloat16)] * len(on_device)


def test_sglang_is_told_by_an_argument_that_nobody_else_may_give(folder):
    rollout = RolloutConfig(engine="sglang", weights="fp8_block", engine_args={"max_running_requests": 2})
    arguments = in_number_format(rollout, read_json(folder / CONFIG))
    started = server_arguments(folder, arguments, 1, "key")
    told = json.loads(started["json_model_override_args"])
    assert list(told) == ["quantization_config"]
    assert told["quantization_config"]["modules_to_not_convert"] == ["lm_head", "model.embed_tokens"]
    assert started["max_running_requests"] == 2
    of_others = {name: value for name, value in told["quantization_config"].items() if name != NUMBER_FORMAT}
    for other in ("{", "{}", json.dumps({"quantization_config": of_others})):
        with pytest.raises(UserError, match=r"json_model_override_args.* is not supported: the trainer follows config"):
            server_arguments(folder, {"json_model_override_args": other}, 1, "key")


def test_sglang_is_told_of_int8_in_a_form_of_its_own(folder, tmp_path):
    """Its form of compressed-tensors has no experts in INT8, and modules in the list are linear layers to it."""
    sparse = write_tiny_model("qwen3_moe", tmp_path / "qwen3_moe")
    ignored = {folder: [], sparse: [f"model.layers.{layer}.mlp.gate" for layer in range(3)]}
    for model, routers in ignored.items():
        arguments = in_number_format(RolloutConfig(engine="sglang", weights="int8_channel"), read_json(model / CONFIG))
        told = json.loads(server_arguments(model, arguments, 1, "key")["json_model_override_args"])
        assert told == {
            "quantization_config": {"quant_method": "w8a8_int8", "ignore": routers, NUMBER_FORMAT: "int8_channel"}
        }


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        (
            {"engine": "transformers"},
            "rollout.weights=fp8_block is not for rollout.engine=transformers, which holds weights as they are trained",
        ),
        (
            {"engine_args": {"quantization": "fp8_per_tensor"}},
            "rollout.engine_args.quantization=fp8_per_tensor contradicts rollout.weights",
        ),
        (
            {"engine_args": {"load_format": "runai_streamer"}},
            "rollout.engine_args.load_format=runai_streamer is not supported with rollout.weights=fp8_block",
        ),
        (
            {"engine_args": {"tensor_parallel_size": 8}},
            "an engine that cuts model.layers.0.mlp.down_proj.weight over 8 ranks cuts its 256 through them",
        ),
        (
            {"engine": "sglang", "engine_args": {"quantization": "w8a8_fp8"}},
            "rollout.engine_args.quantization=w8a8_fp8 contradicts rollout.weights",
        ),
        (
            {"engine": "sglang", "engine_args": {"json_model_override_args": "{}"}},
            "rollout.engine_args.json_model_override_args={} contradicts rollout.weights",
        ),
        (
            {"engine": "sglang", "engine_args": {"load_format": "flash_rl"}},
            "rollout.engine_args.load_format=flash_rl is not supported with rollout.weights=fp8_block",
        ),
        (
            {"engine": "sglang", "engine_args": {"tp_size": 8}},
            "an engine that cuts model.layers.0.mlp.down_proj.weight over 8 ranks cuts its 256 through them",
        ),
        (
            {"engine": "sglang", "weights": "mxfp8"},
            "rollout.weights=mxfp8 is not for rollout.engine=sglang, which holds fp8_block, fp8_block_ue8m0,"
            " int8_channel: take one of these",
        ),
        (
            {"engine": "sglang", "weights": "int8_channel", "engine_args": {"moe_runner_backend": "triton_kernel"}},
            "rollout.engine_args.moe_runner_backend=triton_kernel is not supported with rollout.weights=int8_channel",
        ),
        (
            {"engine": "sglang", "weights": "int8_channel", "engine_args": {"moe_a2a_backend": "deepep"}},
            "rollout.engine_args.moe_a2a_backend=deepep is not supported with rollout.weights=int8_channel",
        ),
        (
            {"weights": "mxfp8", "engine_args": {"tensor_parallel_size": 16}},
            "rollout.weights=mxfp8 needs whole blocks of 32 columns, and model.layers.0.mlp.down_proj.weight has 256",
        ),
        (
            {"weights": "int8_chanel"},
            "'int8_chanel': it is none of as_trained, fp8_block, fp8_block_ue8m0, int8_channel, mxfp8, nvfp4",
        ),
    ],
)
def test_engines_that_cannot_hold_the_format_are_refused(folder, rollout, says):
    model = read_model(ModelConfig(str(folder)), [])
    with pytest.raises(UserError) as refusal:
        check_held(model, RolloutConfig(**{"weights": "fp8_block", **rollout}))
    assert says in str(refusal.value)


@pytest.fixture(scope="module")
def folder_in_fp8(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("model") / "fp8"
    shutil.copytree(folder, copy)
    architecture = read_architecture(read_json(folder / CONFIG))
    weights = load_file(folder / "model.safetensors")
    for name in FP8_BLOCK.quantised_names(architecture):
        weights[name], weights[FP8_BLOCK.scales_name(name)] = FP8_BLOCK.quantise(weights[name].to(torch.bfloat16))
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    config = {**read_json(folder / CONFIG), "quantization_config": quantisation_config(architecture)}
    (copy / CONFIG).write_text(json.dumps(config))
    return copy


REFUSED = r"is in FP8, and the weights that are trained are not: make a folder in bf16 of it"


def config_of(recipe, run, *overrides):
    return compose(recipe, [*overrides, f"output_dir={run}", "megatron.expert_model_parallel_size=1"])


@pytest.mark.parametrize("command", ["train", "spin", "sft", "dpo", "reward-model"])
def test_a_model_that_is_in_fp8_is_not_trained(command, folder_in_fp8, tmp_path):
    with pytest.raises(UserError, match=REFUSED):
        RunSetup.read(config_of("quickstart", tmp_path / "run", f"model.path={folder_in_fp8}"), command)


def test_a_model_that_is_in_fp8_is_trained_once_it_was_converted(folder_in_fp8, tmp_path):
    megatron = tmp_path / "megatron"
    arguments = {"dtype": "bf16", "vocabulary_multiple": 1, "workers": 1, "progress": lambda _done, _total: None}
    convert_checkpoint(folder_in_fp8, megatron, ParallelSizes(), **arguments)
    places = [f"model.path={megatron / HUGGINGFACE}", f"model.megatron_checkpoint={megatron}"]
    setup = RunSetup.read(config_of("quickstart", tmp_path / "run", *places), "sft")
    assert setup.model.architecture.hf_config["dtype"] == "bfloat16"


def test_a_critic_that_is_in_fp8_is_refused_and_a_teacher_is_read(folder, folder_in_fp8, tmp_path):
    model, policy = read_model(ModelConfig(str(folder)), []), f"model.path={folder}"
    critic = config_of("quickstart_ppo", tmp_path / "run", policy, f"critic.path={folder_in_fp8}")
    with pytest.raises(UserError, match=REFUSED):
        check_auxiliary(critic, model, [])
    teacher = config_of("quickstart_distillation", tmp_path / "run", policy, f"teachers.sums.path={folder_in_fp8}")
    check_auxiliary(teacher, model, [])


def test_a_model_that_is_in_fp8_is_served_as_it_is(folder_in_fp8):
    with pytest.raises(UserError, match=r"and model\.path is in FP8 already: leave rollout\.weights out"):
        in_number_format(RolloutConfig(weights="fp8_block"), read_json(folder_in_fp8 / CONFIG))
