from pathlib import Path

import pytest
import torch
from conversion.synthetic import narrow_config, write_checkpoint
from transformers import AutoTokenizer

from converters.architectures import read_architecture
from converters.boxes import Box
from converters.convert import check_checkpoint
from converters.formats.safetensors import HuggingFaceCheckpoint

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


def test_an_fp8_checkpoint_has_a_scale_for_every_block(tmp_path: Path) -> None:
    write_checkpoint(SMALL, tmp_path / "model", fp8=True)
    checkpoint = HuggingFaceCheckpoint(tmp_path / "model")
    assert checkpoint.config["quantization_config"]["weight_block_size"] == [128, 128]
    codes = [name for name, dtype in checkpoint.dtypes.items() if dtype is torch.float8_e4m3fn]
    architecture = read_architecture(checkpoint.config)
    projections = {name for name in architecture.hf_shapes if "_proj" in name and "eh_proj" not in name}
    assert set(codes) == projections
    for name in codes:
        rows, columns = checkpoint.shapes[name]
        scale = read(checkpoint, f"{name}_scale_inv")
        assert scale.dtype is torch.float32
        assert scale.shape == (-(-rows // 128), -(-columns // 128))
        assert scale.min() > 0
        assert read(checkpoint, name).float().isfinite().all()
    others = checkpoint.shapes.keys() - projections - {f"{name}_scale_inv" for name in codes}
    assert others == (architecture.hf_shapes.keys() | architecture.hf_copies.keys()) - projections


@pytest.mark.parametrize("size_bytes", [300_000_000, 1_200_000_000])
def test_a_config_has_about_the_wanted_size(size_bytes: int) -> None:
    architecture = read_architecture(narrow_config(size_bytes))
    dtypes = architecture.hf_dtypes(torch.bfloat16)
    stored = [*architecture.hf_shapes, *architecture.hf_copies.values()]
    total = sum(torch.Size(architecture.hf_shapes[name]).numel() * dtypes[name].itemsize for name in stored)
    assert total == pytest.approx(size_bytes, rel=0.1)
