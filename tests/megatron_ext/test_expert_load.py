"""The tokens that each expert of each layer gets in a train step, and its bias after it, however the model is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from long_cases import but_long
from megatron.core.transformer.moe.router import TopKRouter
from parallel_rank import parallel_rank
from torch import Tensor

from converters.architectures import read_architecture
from converters.boxes import Box
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

LENGTHS = (23, 20, 11, 5)
"""Odd, so that tensor and context parallelism fill up micro-batches."""
PREFIX = 17
"""The first two sequences begin with as many tokens in common."""
TOPK = 2
RATE = 0.05
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        "deepseek_v3", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    )


def loads(
    rank: int, sizes: ParallelSizes, folder: Path, transformer: dict[str, Any], shared_prefixes: bool
) -> tuple[Tensor | None, dict[tuple[bool, int], Tensor], Tensor | None]:
    """Load of a step, the biases of this rank's layers after it, and load of another step, with predictions before.

    Biases are found by whether their layer is for prediction, and by its number.
    """
    chosen = {"moe_router_bias_update_rate": RATE, **transformer}
    options = MegatronOptions(
        sizes,
        torch.float32,
        transformer=chosen,
        optimizer={"lr": 0.0},
        shared_prefixes=shared_prefixes,
        mtp_training="none" if shared_prefixes else "detached",
    )
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.prepare_training(2)
    tokens = torch.arange(sum(LENGTHS)) % 40 + 4
    tokens[LENGTHS[0] : LENGTHS[0] + PREFIX] = tokens[:PREFIX]
    whole = RaggedBatch(tokens, torch.tensor(LENGTHS), {"weights": torch.ones(len(tokens))})
    batch = whole.select(range(parallel_rank().data, len(LENGTHS), sizes.data_parallel_size))
    of_tokens = [[0, 1], [2, 3]] if shared_prefixes else [[index] for index in range(len(batch))]
    # Some are empty, as where other ranks have more: enough to turn biases round if what fills them counted.
    micro_batches: list[list[int]] = [*of_tokens, *([] for _ in range(6))]
    first = model.train_step(batch, micro_batches, SftObjective())
    biases = {
        (name.startswith("module.mtp"), module.layer_number - 1): module.expert_bias.clone()
        for name, module in model.chunks[0].named_modules()
        if isinstance(module, TopKRouter)
    }
    model.log_probs(batch, micro_batches, temperature=1.0)
    return first.expert_load, biases, model.train_step(batch, micro_batches, SftObjective()).expert_load


CUTS = {
    "one": (ParallelSizes(), FULL, False),
    "shared prefixes": (ParallelSizes(), {}, True),
    "TP2 EP2": (
        ParallelSizes(
            world_size=4, tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
        ),
        {},
        False,
    ),
    "CP2": (ParallelSizes(world_size=2, context_parallel_size=2, expert_model_parallel_size=2), FULL, False),
    "PP2": (ParallelSizes(world_size=2, pipeline_model_parallel_size=2), {}, False),
}


@pytest.fixture(scope="module")
def of_one_rank(folder: Path) -> Any:
    return run_ranks(loads, ParallelSizes(), folder, {}, False)[0]


def test_every_token_is_counted_once_and_the_bias_follows_the_load(folder: Path, of_one_rank: Any) -> None:
    """An expert with less than the mean is favoured from then on, one with more is not (arXiv 2408.15664)."""
    one, biases, then = of_one_rank
    # The first layer is dense.
    assert one.sum(1).tolist() == [0, *[TOPK * sum(LENGTHS)] * 3]
    assert [layer for is_mtp, layer in biases if not is_mtp] == [1, 2, 3]
    assert any(is_mtp for is_mtp, _ in biases)
    before = HuggingFaceCheckpoint(folder)
    for (is_mtp, layer), bias in biases.items():
        if not is_mtp:
            name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            begun_with = before.read(name, Box.whole(before.shapes[name]))
            change = RATE * torch.sign(one[layer].float().mean() - one[layer])
            assert change.any()
            torch.testing.assert_close(bias, begun_with + change)
    assert not torch.equal(then, one)


@pytest.mark.parametrize("cut", but_long(CUTS, "shared prefixes", "PP2", "TP2 EP2", "one"))
def test_the_load_is_that_of_all_ranks_however_the_model_is_cut(cut: str, folder: Path, of_one_rank: Any) -> None:
    one, biases, then = of_one_rank
    sizes, transformer, shared_prefixes = CUTS[cut]
    for load, of_layers, then_load in run_ranks(loads, sizes, folder, transformer, shared_prefixes):
        assert torch.equal(load, one)
        assert torch.equal(then_load, then)
        assert of_layers
        for layer, bias in of_layers.items():
            # The prediction layer does not run beside shared prefixes here.
            assert torch.equal(bias, biases[layer]) != (shared_prefixes and layer[0])
