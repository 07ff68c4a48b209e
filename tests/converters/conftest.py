"""Small checkpoints in which every element has a value of its own, so that none can be mistaken for another."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import convert, make, random_numbers
from distributed import tiny
from safetensors.torch import save_file
from small_configs import count_up, make_config

from converters.architectures import Architecture, read_architecture
from converters.layouts.megatron import ParallelSizes


@dataclass(frozen=True)
class Model:
    """A model on disk, and what is in it."""

    folder: Path
    config: Mapping[str, Any]
    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]


@pytest.fixture(name="config")
def config_fixture() -> Callable[..., dict[str, Any]]:
    """`config(name, **fields)`: a config.json with some fields changed."""
    return make_config


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Model]:
    """`make_model(name, **fields)`: a model in one safetensors file, written by the reference library."""

    def make(name: str, **fields: Any) -> Model:
        config = make_config(name, **fields)
        architecture = read_architecture(config)
        tensors = count_up(architecture.hf_shapes)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return Model(folder, config, architecture, tensors)

    return make


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in torch_dist."""
    return tiny(tmp_path_factory.mktemp("original") / "megatron")


@pytest.fixture
def megatron(original: Path, tmp_path: Path) -> Path:
    """The same, of which only the table of contents is a copy."""
    folder = tmp_path / "megatron"
    (folder / "release").mkdir(parents=True)
    for path in original.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(original)
            target.parent.mkdir(exist_ok=True)
            if path.name == ".metadata":
                target.write_bytes(path.read_bytes())
            else:
                target.symlink_to(path)
    return folder


@pytest.fixture(scope="session")
def megatron_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint of two ranks, with its manifest."""
    folder = tmp_path_factory.mktemp("megatron")
    make(folder / "hf", "qwen3_tied", draw=random_numbers, copies=("lm_head.weight",))
    convert(folder / "hf", folder / "megatron", ParallelSizes(world_size=2, tensor_model_parallel_size=2))
    return folder / "megatron"
