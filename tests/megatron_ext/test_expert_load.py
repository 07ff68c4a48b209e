"""The tokens that each expert of each layer gets in a train step, however the model is cut and recomputed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from parallel_rank import parallel_rank
from torch import Tensor

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options import MegatronOptions
from megatron_ext.packing import RaggedBatch

LENGTHS = (8, 4, 12, 6)
TOPK = 2
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("deepseek_v3", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 4})


def loads(rank: int, sizes: ParallelSizes, folder: Path, transformer: dict[str, Any]) -> list[Tensor | None]:
    """Loads of two steps, with predictions in between."""
    options = MegatronOptions(sizes, torch.float32, transformer=transformer, optimizer={"lr": 0.0})
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.prepare_training(2)
    tokens = torch.arange(sum(LENGTHS)) % 40 + 4
    whole = RaggedBatch(tokens, torch.tensor(LENGTHS), {"weights": torch.ones(len(tokens))})
    batch = whole.select(range(parallel_rank().data, len(LENGTHS), sizes.data_parallel_size))
    micro_batches = [[index] for index in range(len(batch))]
    first = model.train_step(batch, micro_batches, SftObjective())
    model.log_probs(batch, micro_batches, temperature=1.0)
    return [first.expert_load, model.train_step(batch, micro_batches, SftObjective()).expert_load]


def test_every_token_is_counted_once_by_all_ranks_together(folder: Path) -> None:
    ((one, again),) = run_ranks(loads, ParallelSizes(), folder, {})
    # The first layer is dense.
    assert one.sum(1).tolist() == [0, *[TOPK * sum(LENGTHS)] * 3]
    assert torch.equal(one, again)
    ((recomputed, _),) = run_ranks(loads, ParallelSizes(), folder, FULL)
    assert torch.equal(recomputed, one)
    sizes = ParallelSizes(
        world_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    for rank in run_ranks(loads, sizes, folder, {}):
        assert torch.equal(rank[1], one)
    for rank in run_ranks(loads, ParallelSizes(world_size=2, pipeline_model_parallel_size=2), folder, {}):
        assert torch.equal(rank[0], one)
