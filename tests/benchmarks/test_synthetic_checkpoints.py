from pathlib import Path

import pytest
import torch
from conversion.synthetic import SHAPES, narrow_config, shallow_config, write_checkpoint
from transformers import AutoTokenizer

from converters.architectures import read_architecture
from converters.boxes import Box
from converters.copying import check_checkpoint
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.fp8.names import quantised_names, scales_of
from converters.fp8.quantisation_config import is_block_fp8
from converters.number_formats import FP8_BLOCK

# Wide enough for matrices of several blocks, the last of them cut off.
SMALL = {
    **narrow_config(0),
    "num_hidden_layers": 4,
    "hidden_size": 320,
    "vocab_size": 64,
    "moe_intermediate_size": 96,
}


def read(checkpoint: HuggingFaceCheckpoint, name: str) -> torch.Tensor:
    return checkpoint.read(name, Box.whole(checkpoint.shapes[name]))


def test_a_bf16_checkpoint_is_one_of_its_architecture(tmp_path: Path) -> None:
    total = write_checkpoint(SMALL, tmp_path / "model")
    checkpoint = HuggingFaceCheckpoint(tmp_path / "model")
    architecture = read_architecture(checkpoint.config)
    check_checkpoint(checkpoint, architecture)
    assert checkpoint.shapes.keys() == architecture.hf_shapes.keys() | architecture.hf_copies.keys()
    tensors = {name: read(checkpoint, name) for name in checkpoint.shapes}
    assert {name: tensors[name].dtype for name in architecture.hf_shapes} == architecture.hf_dtypes(torch.bfloat16)
    assert sum(tensor.nbytes for tensor in tensors.values()) == total
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) >= 8
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == SMALL["vocab_size"]
    # Each has values of its own.
    distinct = {tensors[name].contiguous().view(torch.uint8).numpy().tobytes() for name in architecture.hf_shapes}
    assert len(distinct) == len(architecture.hf_shapes)


def test_an_fp8_checkpoint_is_one_of_its_architecture(tmp_path: Path) -> None:
    write_checkpoint(SMALL, tmp_path / "model", fp8=True)
    checkpoint = HuggingFaceCheckpoint(tmp_path / "model")
    architecture = read_architecture(checkpoint.config)
    check_checkpoint(checkpoint, architecture)
    assert is_block_fp8(checkpoint.config)
    scales = scales_of(checkpoint.folder, checkpoint.shapes, checkpoint.dtypes)
    assert scales.keys() == quantised_names(architecture)
    for name, scale_name in scales.items():
        weight = FP8_BLOCK.dequantise(read(checkpoint, name), read(checkpoint, scale_name), torch.float32)
        assert weight.isfinite().all()
        assert 0.01 < weight.std() < 0.1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size_bytes", [300_000_000, 1_200_000_000])
def test_a_config_has_about_the_wanted_size(shape: str, size_bytes: int) -> None:
    architecture = read_architecture(SHAPES[shape](size_bytes))
    dtypes = architecture.hf_dtypes(torch.bfloat16)
    stored = [*architecture.hf_shapes, *architecture.hf_copies.values()]
    total = sum(torch.Size(architecture.hf_shapes[name]).numel() * dtypes[name].itemsize for name in stored)
    assert total == pytest.approx(size_bytes, rel=0.1)


def test_the_smallest_config_is_one_of_its_architecture() -> None:
    assert read_architecture(shallow_config(1)).hf_shapes
