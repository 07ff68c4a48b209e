"""Sequences cut over the ranks of a group: results and gradients are those of one rank that has all of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import run_ranks
from long_cases import but_long
from parallel_rank import parallel_rank
from parity import in_huggingface_names, sequences
from test_model import assert_same_gradients
from torch import Tensor

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext.attention.context_parallel import cut
from megatron_ext.forward import forward_backward, predict_labels, predict_values
from megatron_ext.log_probs import LogProbs
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, pack

ONE = ParallelSizes()
CP2 = ParallelSizes(world_size=2, context_parallel_size=2)
SIZES = {
    "CP2": CP2,
    "CP4": ParallelSizes(world_size=4, context_parallel_size=4),
    "CP2 EP2": replace(CP2, expert_model_parallel_size=2),
    "CP2 TP2": replace(CP2, world_size=4, tensor_model_parallel_size=2),
    "CP2 PP2": replace(CP2, world_size=4, pipeline_model_parallel_size=2),
    "CP2 DP2 EP2": replace(CP2, world_size=4, expert_model_parallel_size=2),
}
MODELS = {
    "CP2": ("qwen3", "gemma2"),
    "CP4": ("llama",),
    "CP2 EP2": ("qwen3_moe", "deepseek_v3"),
    "CP2 TP2": ("qwen3", "deepseek_v3"),
    "CP2 PP2": ("qwen2",),
    "CP2 DP2 EP2": ("qwen3_moe",),
}
CASES = {f"{sizes}-{name}": (sizes, name) for sizes, names in MODELS.items() for name in names}
ALL = ("qwen2", "qwen3", "llama", "gemma2", "qwen3_moe", "deepseek_v3")
# Sequences of each micro-batch, of each data-parallel rank; one is empty.
CUTS = {1: [[[3, 0], [4], [1, 2], []]], 2: [[[2, 0], [4]], [[1], [3]]]}


def whole_batch() -> RaggedBatch:
    tokens = sequences()[0]
    weights = [torch.linspace(0.1, 1, len(each)) * (torch.arange(len(each)) >= len(each) // 3) for each in tokens]
    lengths = torch.tensor([len(each) for each in tokens])
    return RaggedBatch(torch.cat(tokens), lengths, {"weights": torch.cat(weights)})


class OfWholeResponses:
    """A loss that no part of a response has: the square of its weighted log-probs and entropies."""

    def __call__(self, predictions: LogProbs | Tensor, micro_batch: MicroBatch) -> tuple[Tensor, float]:
        values = predictions
        if isinstance(predictions, LogProbs):
            values = predictions.log_probs + 0.5 * predictions.entropy
        weighted = (values * micro_batch.fields["weights"])[: micro_batch.real_tokens]
        sums = [each.sum() for each in weighted.split(micro_batch.lengths.tolist())]
        loss = torch.stack(sums).square().sum() / 100 if sums else 0 * weighted.sum()
        return loss, float(loss.detach())


def results(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path], head: str) -> dict[str, Any]:
    """Predictions of each model, the objective's loss, and this rank's share of the gradient."""
    return {name: results_of_model(rank, sizes, folder, head) for name, folder in folders.items()}


def results_of_model(rank: int, sizes: ParallelSizes, folder: Path, head: str) -> dict[str, Any]:
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(
        sizes, torch.float32, optimizer={"lr": 0.0}, distributed={"use_distributed_optimizer": False}
    )
    model = MegatronModel(read_architecture(checkpoint.config), options, rank, head=head)
    model.load_huggingface(checkpoint)
    if head == "value":
        generator = torch.Generator().manual_seed(5)
        for name, tensor in model.local_tensors().items():
            if name.endswith("value_head.weight"):
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    model.prepare_training(1)
    batch, micro_batches = whole_batch(), CUTS[sizes.data_parallel_size][parallel_rank().data]
    own = sorted(index for sequences in micro_batches for index in sequences)
    batch, micro_batches = batch.select(own), [[own.index(index) for index in each] for each in micro_batches]
    if head == "value":
        predictions = model.values(batch, micro_batches)
    else:
        predictions = model.log_probs(batch, micro_batches, temperature=0.5)
    packed = model.micro_batches_of(batch, micro_batches)
    predict = predict_values if head == "value" else predict_labels(0.5)
    metrics = forward_backward(model.chunks, packed, OfWholeResponses(), predict)
    # A part of the sequences is computed here, not all of them.
    part = max(each.own.tokens.shape[1] / max(1, each.real_tokens) for each in packed if each.real_tokens > 10)
    gradients = {name: getattr(tensor, "main_grad", None) for name, tensor in model.local_tensors().items()}
    norms = {name: float(gradient.norm()) for name, gradient in gradients.items() if gradient is not None}
    found = {"own": own, "predictions": predictions, "loss": sum(metrics), "part": part, "norms": norms}
    if head == "language_model":
        found["gradient"] = in_huggingface_names(rank, sizes, folder, model.bare_chunks)
    return found


@pytest.fixture(scope="module")
def folders(tiny_models: Mapping[str, Path]) -> Mapping[str, Path]:
    return {name: tiny_models[name] for name in ALL}


@pytest.fixture(scope="module")
def of_one_rank(folders: Mapping[str, Path]) -> Mapping[str, Any]:
    (found,) = run_ranks(results, ONE, folders, "language_model")
    return found


@pytest.fixture(scope="module")
def of_ranks(folders: Mapping[str, Path]) -> Callable[[str], list[dict[str, Any]]]:
    @cache
    def run(sizes: str) -> list[dict[str, Any]]:
        return run_ranks(results, SIZES[sizes], {name: folders[name] for name in MODELS[sizes]}, "language_model")

    return run


@pytest.mark.parametrize("case", but_long(CASES, "CP4-llama", "CP2 PP2-qwen2"))
def test_predictions_loss_and_gradients_are_those_of_one_rank(
    case: str, of_ranks: Callable[[str], list[dict[str, Any]]], of_one_rank: Mapping[str, Any]
) -> None:
    sizes, name = CASES[case]
    parallel, expected = SIZES[sizes], of_one_rank[name]
    found = [each[name] for each in of_ranks(sizes)]
    lengths = whole_batch().lengths.tolist()
    losses = {}
    for rank, each in enumerate(found):
        assert each["part"] < 2 / parallel.context_parallel_size
        if each["predictions"] is None:
            continue
        losses[parallel.data_parallel_rank(rank)] = each["loss"]
        wanted = [expected["predictions"].log_probs.split(lengths)[index] for index in each["own"]]
        torch.testing.assert_close(each["predictions"].log_probs, torch.cat(wanted), atol=1e-5, rtol=0)
        wanted = [expected["predictions"].greedy.split(lengths)[index] for index in each["own"]]
        assert torch.equal(each["predictions"].greedy, torch.cat(wanted))
    assert sum(losses.values()) == pytest.approx(expected["loss"], rel=1e-5)
    assert_same_gradients([each["gradient"] for each in found], expected["gradient"])


def test_values_are_those_of_one_rank(folders: Mapping[str, Path]) -> None:
    own = {"qwen3": folders["qwen3"]}
    (expected,) = run_ranks(results, ONE, own, "value")
    for each in run_ranks(results, CP2, own, "value"):
        torch.testing.assert_close(each["qwen3"]["predictions"], expected["qwen3"]["predictions"], atol=1e-5, rtol=1e-5)
        assert each["qwen3"]["norms"] == pytest.approx(expected["qwen3"]["norms"], rel=1e-4, abs=1e-6)


@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 16]))
def test_every_token_is_computed_once_at_its_position(lengths: list[int], ranks: int, align: int) -> None:
    total = sum(lengths)
    batch = RaggedBatch(
        torch.arange(1, total + 1), torch.tensor(lengths, dtype=torch.long), {"weights": torch.rand(total)}
    )
    micro_batch = pack(batch, range(len(lengths)))
    parts = [cut(micro_batch, ranks, rank, align) for rank in range(ranks)]
    assert len({part.tokens.shape[1] for part in parts}) == 1
    assert parts[0].tokens.shape[1] % align == 0
    for name in ("tokens", "labels", "position_ids", "asked"):
        of_all = torch.cat([getattr(part, name).flatten() for part in parts])
        assert torch.equal(of_all[parts[0].places], getattr(micro_batch, name).flatten()), name
    of_all = torch.cat([part.tokens[0] for part in parts])
    assert sorted(of_all[of_all > 0].tolist()) == list(range(1, total + 1))
    # Each rank has the same number of tokens of every sequence: an early stretch of it and a late one.
    assert all(int(length) % (2 * ranks) == 0 for length in parts[0].cu_seqlens.diff())
