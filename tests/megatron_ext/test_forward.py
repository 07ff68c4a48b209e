"""Passes through the schedules: what a forward pass alone leaves out, and what waits for slow disks."""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from megatron.core import tensor_parallel

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BATCH = RaggedBatch(torch.arange(4, 16), torch.tensor([5, 7]), {"weights": torch.ones(12)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 2})


def make_model(rank: int, sizes: ParallelSizes, folder: Path) -> MegatronModel:
    options = MegatronOptions(sizes, torch.float32, transformer=RECOMPUTE, optimizer={"lr": 0.0})
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.prepare_training(1)
    return model


def test_predictions_alone_recompute_nothing_and_the_next_step_does_again(folder: Path) -> None:
    (checkpoints,) = run_ranks(checkpoints_of_passes, ParallelSizes(), folder)
    assert checkpoints == {"log_probs": 0, "train_step": 2}


def checkpoints_of_passes(rank: int, sizes: ParallelSizes, folder: Path) -> dict[str, int]:
    """How often a layer was to be recomputed later."""
    model, calls, checkpoint = make_model(rank, sizes, folder), [], tensor_parallel.checkpoint

    def counting(*arguments):
        calls.append(arguments)
        return checkpoint(*arguments)

    tensor_parallel.checkpoint = counting
    model.log_probs(BATCH, [[0, 1]], temperature=1.0)
    of_log_probs = len(calls)
    model.train_step(BATCH, [[0, 1]], SftObjective())
    return {"log_probs": of_log_probs, "train_step": len(calls) - of_log_probs}


def test_fp8_gets_whole_blocks_of_tokens_and_padding_changes_nothing(folder: Path) -> None:
    (sizes, differences) = run_ranks(sizes_of_micro_batches, ParallelSizes(), folder)[0]
    assert sizes == {"fp8": [16], "mxfp8": [32]}
    assert max(differences) < 1e-6


def sizes_of_micro_batches(rank: int, sizes: ParallelSizes, folder: Path) -> tuple[dict[str, list[int]], list[float]]:
    model, found, differences = make_model(rank, sizes, folder), {}, []
    plain = model.log_probs(BATCH, [[0, 1]], temperature=1.0).log_probs
    for name, fields in {"fp8": {"fp8": "e4m3"}, "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}.items():
        # The model stays as it is: products of 8 bits need a GPU.
        model.options = replace(model.options, transformer=fields)
        found[name] = [each.tokens.numel() for each in model.micro_batches_of(BATCH, [[0, 1]])]
        padded = model.log_probs(BATCH, [[0, 1]], temperature=1.0).log_probs
        differences.append(float((padded - plain).abs().max()))
    return found, differences


def test_an_export_waits_longer_than_collectives_do(folder: Path, tmp_path: Path) -> None:
    run_ranks(export_late, ParallelSizes(world_size=2), folder, tmp_path / "export")
    assert (tmp_path / "export" / CONFIG).exists()


def export_late(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> None:
    model = make_model(rank, sizes, folder)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    if rank == 1:
        time.sleep(2.5)
    model.export_huggingface(target, folder)
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=5), dist.group.WORLD)
