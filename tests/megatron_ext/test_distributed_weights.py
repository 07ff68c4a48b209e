"""Distributed checkpoints of live models, loaded at other layouts: bit for bit what reading HuggingFace gives."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distinct_vectors import with_distinct_vectors
from launch import run_in_turn, run_ranks
from long_cases import but_long
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from parity import loaded_model

from converters.architectures import Architecture, read_architecture
from converters.boxes import Box
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.formats.torch_dist import Contents, read_metadata, write_metadata
from converters.layouts.megatron import ModuleNames, ParallelSizes
from converters.layouts.torch_dist import has_uniform_layers
from converters.megatron_to_hf import export_checkpoint
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import compat
from megatron_ext.checkpoint import checkpoint
from megatron_ext.checkpoint.distributed_weights import load_distributed, sharded, transformer_engine_keys
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.model.model import build_model, local_tensors
from megatron_ext.options.options import MegatronOptions

SIZES = {
    "one": ParallelSizes(),
    "TP2 EP2": ParallelSizes(
        world_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    ),
    "TP2 EP1": ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    "PP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    "PP2 VPP2": ParallelSizes(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
}
DENSE, MOE = ("qwen3", "gemma2"), ("qwen3_moe", "first_layer_dense", "deepseek_v3")
SAVED = {"dense": ("TP2 EP1", DENSE), "moe": ("TP2 EP2", MOE)}


@pytest.fixture(scope="module")
def models(tiny_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Uniform layers, and two families whose layers differ."""
    root = tmp_path_factory.mktemp("models")
    fields = {"num_hidden_layers": 4, "mlp_only_layers": [0]}
    first_layer_dense = write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("first_layer_dense"), fields=fields)
    sources = {**tiny_models, "first_layer_dense": first_layer_dense}
    return {name: with_distinct_vectors(sources[name], root / name) for name in (*DENSE, *MOE)}


@pytest.fixture(scope="module")
def saved(models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below it `NAME-local` and `NAME-te`, saved by two ranks; of one model `-optimizer` and `-per_layer` too.

    The last has the keys of layers that differ, as any model of Megatron-LM's may.
    """
    root = tmp_path_factory.mktemp("saved")
    run_in_turn(
        [
            *((save, SIZES[sizes], {name: models[name] for name in names}, root) for sizes, names in SAVED.values()),
            (save_with_optimizer, SIZES["TP2 EP2"], models["qwen3_moe"], root / "qwen3_moe-optimizer"),
            (save_per_layer, SIZES["PP2"], models["qwen3_moe"], root / "qwen3_moe-per_layer"),
        ]
    )
    return root


def architecture_of(folder: Path) -> Architecture:
    return read_architecture(HuggingFaceCheckpoint(folder).config)


def sharded_weights(
    chunks: Sequence[GPTModel], architecture: Architecture, *, module_names: ModuleNames = "te"
) -> dict[str, ShardedStateDict]:
    """State dicts for `dist_checkpointing.save` with the keys of Transformer Engine's modules, or of local ones."""
    uniform = has_uniform_layers(architecture)
    weights = sharded(chunks, uniform=uniform)
    if module_names == "te":
        for chunk, tensors in zip(chunks, weights.values(), strict=True):
            for name, key in transformer_engine_keys(chunk, architecture, uniform=uniform).items():
                if name in tensors:
                    tensors[name].key = key
    return weights


def save(rank: int, sizes: ParallelSizes, models: Mapping[str, Path], root: Path) -> None:
    for name, folder in models.items():
        chunks = loaded_model(rank, sizes, folder)
        for names in ("local", "te"):
            target = root / f"{name}-{names}"
            target.mkdir(exist_ok=True)
            torch.distributed.barrier()
            dist_checkpointing.save(sharded_weights(chunks, architecture_of(folder), module_names=names), str(target))


def save_with_optimizer(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> None:
    options = MegatronOptions(sizes, torch.float32, optimizer={"lr": 1e-3}, scheduler={})
    model = MegatronModel(architecture_of(folder), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.prepare_training(1)
    compat.prime_optimizer_state(model.optimizer)
    target.mkdir(exist_ok=True)
    torch.distributed.barrier()
    checkpoint.save(model, target)


def save_per_layer(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> None:
    (chunk,) = loaded_model(rank, sizes, folder)
    target.mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True}), str(target))


def differences(rank: int, sizes: ParallelSizes, cases: list[tuple[Path, Path]]) -> list[str]:
    """Tensors of this rank that are not what reading the HuggingFace checkpoint gives; the model starts as NaN."""
    found = []
    for folder, stored in cases:
        expected = {name: tensor.clone() for name, tensor in local_tensors(loaded_model(rank, sizes, folder)).items()}
        chunks = build_model(architecture_of(folder), sizes, params_dtype=torch.float32)
        with torch.no_grad():
            for tensor in local_tensors(chunks).values():
                tensor.fill_(float("nan"))
        load_distributed(chunks, architecture_of(folder), stored)
        found += [
            f"{stored.name}: {name}"
            for name, tensor in local_tensors(chunks).items()
            if not torch.equal(tensor, expected[name])
        ]
    return found


@pytest.mark.parametrize("sizes", but_long(["one", "PP2", "PP2 VPP2", "TP2 EP1"], "PP2", "TP2 EP1"))
def test_any_layout_and_names_load_at_any_layout(sizes: str, models: Mapping[str, Path], saved: Path) -> None:
    cases = [(models[stored.name.split("-")[0]], stored) for stored in sorted(saved.iterdir())]
    assert len(cases) == 2 * len(models) + 2
    assert run_ranks(differences, SIZES[sizes], cases) == [[] for _ in range(SIZES[sizes].world_size)]


def test_every_saved_checkpoint_exports_to_the_model_it_was(
    models: Mapping[str, Path], saved: Path, tmp_path: Path
) -> None:
    for stored in saved.iterdir():
        source = models[stored.name.split("-")[0]]
        export_checkpoint(
            stored,
            tmp_path / stored.name,
            hf_config_folder=source,
            fp8=False,
            shard_size_bytes=10**9,
            workers=1,
            progress=lambda _done, _total: None,
        )
        exported, original = HuggingFaceCheckpoint(tmp_path / stored.name), HuggingFaceCheckpoint(source)
        assert exported.shapes == original.shapes
        assert exported.dtypes == original.dtypes
        for name, shape in original.shapes.items():
            whole = Box.whole(shape)
            assert torch.equal(exported.read(name, whole), original.read(name, whole)), (stored.name, name)


def test_names_are_those_of_either_kind_of_modules(saved: Path) -> None:
    def keys(name: str) -> set[str]:
        return {key for key in read_metadata(saved / name).tensors if not key.startswith("optimizer.")}

    assert "decoder.layers.pre_mlp_layernorm.weight" in keys("qwen3_moe-te")
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in keys("qwen3_moe-local")
    assert keys("qwen3_moe-optimizer") == keys("qwen3_moe-local")
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in keys("first_layer_dense-te")
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in keys("first_layer_dense-te")
    assert "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight" in keys("deepseek_v3-te")
    assert "decoder.layers.0.self_attention.kv_layernorm.weight" in keys("deepseek_v3-local")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 3}, r"holds decoder\.layers\..* with shape \[4, .*gives \[3, "),
        ({"intermediate_size": 200}, r"linear_fc1\.weight with shape \[4, 384, 96\].*\[4, 400, 96\]"),
        ({"vocab_size": 70}, r"embedding\.word_embeddings\.weight with shape \[64, 96\].*\[70, 96\]"),
        ({"tie_word_embeddings": True}, r"holds output_layer\.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    fields: dict[str, Any], words: str, models: Mapping[str, Path], saved: Path
) -> None:
    config = HuggingFaceCheckpoint(models["qwen3"]).config
    with pytest.raises(UserError, match=words):
        load_distributed([], read_architecture({**config, **fields}), saved / "qwen3-te")


def test_a_missing_tensor_is_named(models: Mapping[str, Path], saved: Path, tmp_path: Path) -> None:
    key = "decoder.layers.self_attention.k_layernorm.weight"
    contents = read_metadata(saved / "qwen3-te")
    damaged(saved / "qwen3-te", tmp_path, {name: each for name, each in contents.tensors.items() if name != key})
    with pytest.raises(UserError, match=f"lacks {key}"):
        load_distributed([], architecture_of(models["qwen3"]), tmp_path)


def test_a_missing_chunk_is_named(models: Mapping[str, Path], saved: Path, tmp_path: Path) -> None:
    key = "decoder.layers.mlp.linear_fc2.weight"
    tensors = dict(read_metadata(saved / "qwen3-te").tensors)
    tensors[key] = replace(tensors[key], chunks=tensors[key].chunks[1:])
    damaged(saved / "qwen3-te", tmp_path, tensors)
    with pytest.raises(UserError, match=f"elements of {key}"):
        load_distributed([], architecture_of(models["qwen3"]), tmp_path)


def damaged(original: Path, target: Path, tensors: Mapping[str, Any]) -> None:
    """A checkpoint of the same files whose table of contents lists `tensors`."""
    for path in original.iterdir():
        if path.name != ".metadata":
            (target / path.name).symlink_to(path)
    write_metadata(target, Contents(tensors, read_metadata(original).objects))


def test_a_weight_that_is_no_number_is_refused(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    (said,) = run_ranks(load_with_a_nan, SIZES["one"], tiny_models["qwen3"], tmp_path)
    assert re.match(r"the weights of .*saved are damaged: decoder\.final_layernorm\.weight holds a NaN", said)


def load_with_a_nan(rank: int, sizes: ParallelSizes, folder: Path, scratch: Path) -> str:
    chunks, target = loaded_model(rank, sizes, folder), scratch / "saved"
    with torch.no_grad():
        local_tensors(chunks)["decoder.final_layernorm.weight"][3] = float("nan")
    target.mkdir()
    dist_checkpointing.save(sharded_weights(chunks, architecture_of(folder)), str(target))
    try:
        load_distributed(chunks, architecture_of(folder), target)
    except UserError as error:
        return str(error)
    return "nothing"
