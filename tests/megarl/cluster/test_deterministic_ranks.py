"""Ranks that compute the same bits each time: torch is told where they join, and takes no other kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks

from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.cluster.trainer.batch import Batch
from megarl.cluster.trainer.trainer_worker import TrainerWorker
from megarl.process.ports import free_port
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import parallel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch


def joined_and_trained(
    _rank: int, sizes: ParallelSizes, folder: Path, transformer: dict[str, Any]
) -> tuple[bool, float]:
    """Whether torch was told, and the norm of the gradients of a step."""
    parallel.shutdown()
    worker = TrainerWorker(0)
    options = MegatronOptions(sizes, torch.float32, transformer=transformer, optimizer={"lr": 0.0})
    worker.join(options, f"tcp://127.0.0.1:{free_port()}", 60.0)
    told = torch.are_deterministic_algorithms_enabled()
    worker.build(folder, None, options, 1, False, "language_model")
    tokens, lengths = torch.arange(30) % 40 + 4, torch.tensor([12, 10, 8])
    batch = Batch.of(RaggedBatch(tokens, lengths, {"weights": torch.full((30,), 0.1)}))
    result = worker.train_step(batch, [[0, 1], [2]], True, SftObjective(), 1.0)
    assert result is not None
    return told, result.gradient_norm


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_a_rank_tells_torch_and_trains(model: str, tmp_path: Path) -> None:
    folder = write_tiny_model(model, tmp_path / "model")
    (plain,) = run_ranks(joined_and_trained, ParallelSizes(), folder, {})
    on = {"deterministic_mode": True}
    first, again = (run_ranks(joined_and_trained, ParallelSizes(), folder, on)[0] for _ in range(2))
    assert (plain[0], first[0]) == (False, True)
    assert first == again
    assert first[1] == pytest.approx(plain[1])
