"""Logits are made for the labels that something asks about, and for no others."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from parity import VOCABULARY, loaded_model
from torch import Tensor

from converters.layouts.megatron import ParallelSizes
from megatron_ext.packing.packing import RaggedBatch, pack

ASKED = torch.tensor([False, True, True, False, True, False])


def predictions(rank: int, sizes: ParallelSizes, folder: Path, ask: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of six labels, and the gradients of their sum at ASKED: of hidden states and of the output layer.

    With `ask` the states of the other labels are not numbers, which everything that is computed from them would show.
    """
    (model,) = loaded_model(rank, sizes, folder, {})
    tokens, width, parts = len(ASKED), model.config.hidden_size, sizes.tensor_model_parallel_size
    hidden = torch.randn(tokens, 1, width, generator=torch.Generator().manual_seed(5))
    if ask:
        hidden[~ASKED] = math.nan
    own = hidden.chunk(parts)[rank].clone().requires_grad_()
    labels = torch.arange(tokens) % VOCABULARY
    found = model.predict_labels(own, labels, ASKED if ask else None, temperature=0.7)
    (found.log_probs + found.entropy)[ASKED].sum().backward()
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    assert own.grad is not None
    return found.log_probs.detach(), own.grad, weight.grad


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_labels_that_are_not_asked_about_cost_nothing_and_change_nothing(
    name: str, tiny_models: Mapping[str, Path]
) -> None:
    sizes = ParallelSizes(world_size=2, tensor_model_parallel_size=2)
    whole = run_ranks(predictions, sizes, tiny_models[name], False)
    asked = run_ranks(predictions, sizes, tiny_models[name], True)
    for (log_probs, of_hidden, of_weight), (some, of_some, of_its_weight) in zip(whole, asked, strict=True):
        torch.testing.assert_close(some, log_probs.masked_fill(~ASKED, 0))
        torch.testing.assert_close(of_some, of_hidden)
        torch.testing.assert_close(of_its_weight, of_weight)


def test_what_is_asked_of_a_micro_batch() -> None:
    batch = RaggedBatch(torch.arange(5), torch.tensor([3, 2]))
    trained = batch.with_fields(trained=torch.tensor([False, False, True, False, True]))
    weighted = trained.with_fields(weights=torch.tensor([0.0, 0.0, math.nan, 0.0, 0.0]))
    asked = [pack(each, [0, 1], align=2).asked.tolist() for each in (batch, trained, weighted)]
    assert asked == [
        [True, True, False, True, False, False],
        [False, True, False, True, False, False],
        [False, True, False, False, False, False],
    ]
