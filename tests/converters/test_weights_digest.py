"""The digest of a model's weights: the same for its copies in any form, another one after any training."""

from pathlib import Path

import pytest
import torch
from conversions import FP32, MODELS, convert, make, random_numbers, random_tensors, write_model

from converters.architectures import read_architecture
from converters.examine import weights_digest
from converters.formats.safetensors import HuggingFaceCheckpoint, read_json
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.layouts.megatron import ParallelSizes


def digest_of(folder: Path) -> str:
    return weights_digest(HuggingFaceCheckpoint(folder), read_architecture(read_json(folder / "config.json")))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2", "deepseek_v3", "gemma2"])
def test_copies_of_a_model_have_one_digest_in_every_form(name: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", name, draw=random_numbers)
    digest = digest_of(model)
    tensors = random_tensors(MODELS[name], draw=random_numbers)
    in_files = write_model(tmp_path / "in_files", MODELS[name], tensors, files=3)
    in_fp32 = write_model(tmp_path / "in_fp32", MODELS[name], {key: each.float() for key, each in tensors.items()})
    assert [digest_of(in_files), digest_of(in_fp32)] == [digest] * 2
    for sizes in (ParallelSizes(), ParallelSizes(world_size=2, tensor_model_parallel_size=2)):
        convert(model, target := tmp_path / f"megatron_{sizes.world_size}", sizes)
        assert weights_digest(TorchDistCheckpoint(target), read_architecture(MODELS[name])) == digest


def test_training_of_any_kind_of_tensor_gives_another_digest(tmp_path: Path) -> None:
    tensors = random_tensors(MODELS["qwen3_moe"], draw=random_numbers, dtype=FP32)
    digests = [digest_of(write_model(tmp_path / "model", MODELS["qwen3_moe"], tensors))]
    for kind in ("embed_tokens", "q_proj", "q_norm", "mlp.gate.", "experts.", "model.norm", "lm_head"):
        trained = {name: each + 1e-3 * torch.ones_like(each) * (kind in name) for name, each in tensors.items()}
        digests.append(digest_of(write_model(tmp_path / kind, MODELS["qwen3_moe"], trained)))
    assert len(set(digests)) == len(digests) == 8
