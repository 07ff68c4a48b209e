"""The worth of the comparison of logits: each of these mistakes keeps all shapes, and is far beyond its tolerance."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from parity import computed_logits, loaded_model

from converters.architectures import read_architecture
from converters.copying import read_into
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes, megatron_layout
from megatron_ext.model.model import build_model, local_tensors

LARGEST_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Mistake:
    """HuggingFace names that are taken for others, or fields of the model with another value."""

    model: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    transformer_config: Mapping[str, Any] = field(default_factory=dict)
    gpt_model: Mapping[str, Any] = field(default_factory=dict)

    def rename(self, name: str) -> str:
        return re.sub("|".join(self.renamed) or "$^", lambda found: self.renamed[found[0]], name)


def swapped(one: str, other: str) -> dict[str, str]:
    return {one: other, other: one}


MISTAKES = {
    "gate and up swapped": Mistake("llama", swapped("gate_proj", "up_proj")),
    "norms swapped": Mistake("llama", swapped("input_layernorm", "post_attention_layernorm")),
    "rotary scaling forgotten": Mistake("llama", gpt_model={"rope_scaling": False}),
    "rotary scaling by 8": Mistake("llama", gpt_model={"rope_scaling_factor": 8.0}),
    "key and value bias swapped": Mistake("qwen2", swapped("k_proj.bias", "v_proj.bias")),
    "head norms swapped": Mistake("qwen3", swapped("q_norm", "k_norm")),
    "one expert in place of the next": Mistake(
        "qwen3_moe", {f"experts.{number}": f"experts.{(number + 1) % 4}" for number in range(4)}
    ),
    "gate and up of experts swapped": Mistake("mixtral", swapped("w1", "w3")),
    "two experts swapped": Mistake("mixtral", swapped("experts.1", "experts.2")),
    "softmax before the choice of experts": Mistake("mixtral", transformer_config={"moe_router_pre_softmax": True}),
    "expert biases of another layer": Mistake(
        "glm4_moe",
        swapped("layers.1.mlp.gate.e_score_correction_bias", "layers.2.mlp.gate.e_score_correction_bias"),
    ),
    "whole heads rotated": Mistake("glm4_moe", gpt_model={"rotary_percent": 1.0}),
    "experts not scaled": Mistake("glm4_moe", transformer_config={"moe_router_topk_scaling_factor": 1.0}),
}


def errors_of_logits(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path]) -> dict[str, float]:
    """How far the logits are from the right ones after each mistake."""
    right = {
        model: computed_logits(loaded_model(rank, sizes, folders[model]), sizes)
        for model in sorted({mistake.model for mistake in MISTAKES.values()})
    }
    errors = {}
    for name, mistake in MISTAKES.items():
        wrong = computed_logits(mistaken_model(rank, sizes, folders[mistake.model], mistake), sizes)
        errors[name] = max(float((a - b).abs().max()) for a, b in zip(wrong, right[mistake.model], strict=True))
    return errors


def mistaken_model(rank: int, sizes: ParallelSizes, folder: Path, mistake: Mistake) -> list[torch.nn.Module]:
    checkpoint = HuggingFaceCheckpoint(folder)
    architecture = read_architecture(checkpoint.config)
    wrong = replace(
        architecture,
        transformer_config={**architecture.transformer_config, **mistake.transformer_config},
        gpt_model={**architecture.gpt_model, **mistake.gpt_model},
    )
    chunks = build_model(wrong, sizes, params_dtype=torch.float32)
    placements = megatron_layout(architecture, sizes, module_names="local").placements(rank)
    read_into(
        checkpoint, [each._replace(hf_name=mistake.rename(each.hf_name)) for each in placements], local_tensors(chunks)
    )
    return chunks


@pytest.fixture(scope="module")
def errors(tiny_models: Mapping[str, Path]) -> Mapping[str, float]:
    return run_ranks(errors_of_logits, ParallelSizes(), tiny_models)[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_in_the_logits(mistake: str, errors: Mapping[str, float]) -> None:
    assert errors[mistake] > 10 * LARGEST_TOLERANCE
