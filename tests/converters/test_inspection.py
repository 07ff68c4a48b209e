"""Inspection: what a checkpoint is said to be, beside what transformers and the reference readers say."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conversions import MODELS, convert, export, make, random_numbers, random_tensors, write_model
from safetensors.torch import load_file

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.examine import Inspection, inspect
from converters.layouts.megatron import ParallelSizes

SIZES = ParallelSizes(
    world_size=4,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    make(folder / "model", "deepseek_v3", draw=random_numbers)
    convert(folder / "model", folder / "megatron", SIZES, vocabulary_multiple=16)
    export(folder / "megatron", folder / "fp8", fp8=True, shard_size_bytes=9_000)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_tensors(name, tmp_path):
    """Counted a second time from the tensors and their names."""
    architecture = read_architecture(MODELS[name])
    model = inspect(make(tmp_path / "model", name)).model
    assert model is not None
    tensors = {key: math.prod(shape) for key, shape in architecture.hf_shapes.items()}
    assert model.parameters == sum(tensors.values())
    used = MODELS[name].get("num_experts_per_tok", 0)
    met = 0.0
    for key, elements in tensors.items():
        if not any(key.startswith(f"model.layers.{architecture.num_layers + layer}.") for layer in range(2)):
            is_expert = ".experts." in key
            met += elements * used / model.experts if is_expert else elements
    assert model.parameters_per_token == met


def test_a_huggingface_folder(written):
    found = inspect(written / "model")
    tensors = load_file(written / "model/model.safetensors")
    assert (found.format, found.problem, found.manifest, found.is_fp8) == ("HuggingFace", None, False, False)
    assert (found.tensors, found.layout.files) == (len(tensors), 1)
    assert found.elements == sum(tensor.numel() for tensor in tensors.values())
    assert found.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    single = [tensor for tensor in tensors.values() if tensor.dtype is torch.float32]
    assert found.dtypes["float32"] == (len(single), sum(tensor.nbytes for tensor in single))
    assert found.model is not None
    assert (found.model.model_type, found.model.layers, found.model.mtp_layers) == ("deepseek_v3", 4, 1)
    assert (found.model.experts, found.model.tied) == (4, False)


def test_fp8_is_said_and_its_scales_are_no_parameters(written):
    found = inspect(written / "fp8")
    assert found.is_fp8
    assert found.manifest
    assert found.problem is None
    assert found.elements == inspect(written / "model").elements
    assert found.layout.files == len(list((written / "fp8").glob("*.safetensors")))


def test_a_megatron_checkpoint_says_how_it_was_cut(written):
    found = inspect(written / "megatron")
    assert (found.format, found.problem, found.manifest) == ("Megatron torch_dist", None, True)
    assert found.layout.parallel == {"TP": 2, "PP": 2, "EP": 2, "ETP": 1}
    assert found.layout.iteration == 0
    assert found.layout.files == len(list((written / "megatron/release").glob("*.distcp")))
    metadata = torch.distributed.checkpoint.FileSystemReader(written / "megatron/release").read_metadata()
    entries = [each for each in metadata.state_dict_metadata.values() if hasattr(each, "chunks")]
    assert found.tensors == len(entries)
    assert found.layout.chunks == sum(len(each.chunks) for each in entries)
    assert found.elements == sum(each.size.numel() for each in entries)
    assert found.model == inspect(written / "model").model
    assert inspect(written / "megatron/release").layout == found.layout


def test_without_a_config_it_says_what_it_can(written, tmp_path):
    shutil.copytree(written / "megatron/release", tmp_path / "apart/release")
    found = inspect(tmp_path / "apart/release")
    assert found.model is None
    assert "no config.json" in (found.problem or "")
    assert found.tensors == inspect(written / "megatron").tensors
    known = inspect(tmp_path / "apart/release", hf_config_folder=written / "model")
    assert known.problem is None
    assert known.model is not None


def test_optimizer_state_is_counted_apart(tmp_path):
    state = {"decoder.weight": torch.ones(8), "optimizer.state.exp_avg.decoder.weight": torch.ones(8, 2)}
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path / "saved")
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    found = inspect(tmp_path / "saved")
    assert (found.nbytes, found.optimizer_bytes) == (32, 64)
    assert found.layout.parallel == {}


def write_changed(folder: Path, name: str, **changed: torch.Tensor | None) -> Inspection:
    tensors = {**random_tensors(MODELS[name]), **changed}
    return inspect(write_model(folder, MODELS[name], {key: each for key, each in tensors.items() if each is not None}))


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("model.layers.2.mlp.experts.3.up_proj.weight", None, "lacks the tensor model.layers.2.mlp.experts.3.up_proj"),
        ("surplus", torch.ones(2), "holds the tensor surplus"),
        ("model.norm.weight", torch.ones(9), "model.norm.weight with shape [9]"),
    ],
)
def test_what_is_missing_surplus_or_misshapen_is_named(name, changed, says, tmp_path):
    assert says in (write_changed(tmp_path / "model", "qwen3_moe", **{name: changed}).problem or "")


def test_a_megatron_checkpoint_of_another_model_is_not_complete(written, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["deepseek_v3"], "num_hidden_layers": 5}))
    problem = inspect(written / "megatron", hf_config_folder=tmp_path).problem
    assert "the checkpoint lacks decoder.layers.4." in (problem or "")


def test_an_unknown_family_is_no_obstacle(tmp_path):
    folder = make(tmp_path / "model", "qwen3")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    found = inspect(folder)
    assert found.model is None
    assert "model_type 'gpt2', which is not supported" in (found.problem or "")
    (folder / "config.json").unlink()
    assert "no config.json" in (inspect(folder).problem or "")


def test_no_checkpoint_is_said(tmp_path):
    with pytest.raises(UserError, match=r"holds no checkpoint: neither config.json"):
        inspect(tmp_path)
