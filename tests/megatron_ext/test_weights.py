"""Weights into the shards of ranks and back: bit for bit, under every parallel size."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from parity import loaded_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from converters.architectures import read_architecture
from converters.copying import check_checkpoint
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext.model.model import local_tensors
from megatron_ext.weights import export_huggingface

SIZES = {
    "one": ParallelSizes(),
    "TP2": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "TP2 EP2": ParallelSizes(
        world_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    ),
    "PP2 VPP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "TP2 PP2": ParallelSizes(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
}


def load(rank: int, sizes: ParallelSizes, folder: Path) -> int:
    return len(loaded_model(rank, sizes, folder))


def load_and_export(
    rank: int, sizes: ParallelSizes, folder: Path, exported: Path, dtype: torch.dtype | None = None
) -> int:
    chunks = loaded_model(rank, sizes, folder)
    architecture = read_architecture(HuggingFaceCheckpoint(folder).config)
    export_huggingface(
        chunks, architecture, sizes, rank, exported, folder, torch.distributed.barrier, dtype, shard_size_bytes=200_000
    )
    return sum(tensor.numel() for tensor in local_tensors(chunks).values())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3", "one"),
        ("qwen3", "TP2"),
        ("qwen3", "PP2 VPP2"),
        ("qwen2", "TP2 PP2"),
        ("qwen3_moe", "TP2 PP2"),
        ("qwen3_moe", "TP2 EP2"),
        ("mixtral", "TP2 EP2"),
        ("glm4_moe", "TP2 EP2"),
        ("deepseek_v3", "one"),
        ("deepseek_v3", "TP2 EP2"),
        ("deepseek_v3", "PP2 VPP2"),
    ],
)
def test_an_export_is_the_checkpoint_that_was_loaded(
    name: str, sizes: str, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    held = run_ranks(load_and_export, SIZES[sizes], tiny_models[name], exported)
    original, written = tensors_of(tiny_models[name]), tensors_of(exported)
    assert original.keys() == written.keys()
    for tensor_name, tensor in original.items():
        assert torch.equal(tensor, written[tensor_name]), tensor_name
        assert tensor.dtype == written[tensor_name].dtype, tensor_name
    if len(held) > 1:
        total = sum(tensor.numel() for tensor in original.values())
        assert max(held) < 0.75 * total, "a rank holds most of the model"
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert AutoTokenizer.from_pretrained(exported).chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_weights_are_written_in_the_type_that_is_asked_for(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    run_ranks(load_and_export, SIZES["one"], tiny_models["deepseek_v3"], exported, torch.bfloat16)
    original = tensors_of(tiny_models["deepseek_v3"])
    for name, tensor in tensors_of(exported).items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(tensor, original[name].to(tensor.dtype)), name


def test_copies_of_weights_are_compared_by_one_process_before_and_by_no_rank(
    tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    source = tiny_models["qwen3"]
    architecture = read_architecture(tied := {**HuggingFaceCheckpoint(source).config, "tie_word_embeddings": True})
    (copy,) = architecture.hf_copies
    (tmp_path / "config.json").write_text(json.dumps(tied))
    save_file(
        {**tensors_of(source), copy: torch.zeros(architecture.hf_shapes[architecture.hf_copies[copy]])},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(UserError, match=f"holds {copy} with other values"):
        check_checkpoint(HuggingFaceCheckpoint(tmp_path), architecture)
    assert run_ranks(load, SIZES["one"], tmp_path) == [1]


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    source = tiny_models["qwen3"]
    tensors = tensors_of(source)
    del tensors["model.layers.2.self_attn.k_norm.weight"]
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"UserError: .*lacks the tensor model.layers.2.self_attn.k_norm.weight"):
        run_ranks(loaded_model, SIZES["one"], tmp_path)


def test_an_export_does_not_replace_a_folder(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    exported.mkdir()
    with pytest.raises(RuntimeError, match=r"UserError: .*exists"):
        run_ranks(load_and_export, SIZES["one"], tiny_models["qwen3"], exported)
    assert not list(exported.iterdir())


def refusal(rank: int, sizes: ParallelSizes, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        loaded_model(rank, sizes, folder)
    return str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(
    value: float, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    damaged, name = tmp_path / "damaged", "model.layers.1.self_attn.o_proj.weight"
    shutil.copytree(tiny_models["qwen3"], damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors[name][3, 5] = value
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    (sentence,) = run_ranks(refusal, SIZES["one"], damaged)
    assert f"{name}, or what lies beside it" in sentence
