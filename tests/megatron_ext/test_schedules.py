"""Schedules of the learning rate, in train steps of a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

STEPS = 2


def rates(rank: int, sizes: ParallelSizes, folder: Path, every: list[dict[str, Any]]) -> list[list[float]]:
    """The learning rates of `STEPS` steps along a cosine, and the one after them; for `every` optimizer's fields."""
    checkpoint = HuggingFaceCheckpoint(folder)
    batch = RaggedBatch(torch.arange(3), torch.tensor([3]), {"weights": torch.tensor([0.0, 1.0, 1.0])})
    found = []
    for fields in every:
        options = MegatronOptions(
            sizes, torch.float32, optimizer={"lr": 1e-3, **fields}, scheduler={"lr_decay_style": "cosine"}
        )
        model = MegatronModel(read_architecture(checkpoint.config), options, rank)
        model.load_huggingface(checkpoint)
        model.prepare_training(STEPS)
        taken = [model.train_step(batch, [[0]], SftObjective()).learning_rate for _ in range(STEPS)]
        found.append([*taken, model.optimizer.param_groups[0]["lr"]])
    return found


def test_a_rate_without_a_lowest_one_decays_to_zero(tiny_models: Mapping[str, Path]) -> None:
    every = [{}, {"min_lr": None}, {"min_lr": 2e-4}]
    (found,) = run_ranks(rates, ParallelSizes(), tiny_models["llama"], every)
    assert found == [pytest.approx(expected) for expected in ([1e-3, 5e-4, 0.0], [1e-3, 5e-4, 0.0], [1e-3, 6e-4, 2e-4])]
