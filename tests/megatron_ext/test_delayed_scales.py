"""Scales of 8 bits that follow earlier passes are known before one that counts: beside a played Transformer Engine."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from launch import run_ranks

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext.delayed_scales import DelayedScales
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

BATCH = RaggedBatch(torch.arange(4, 16), torch.tensor([5, 7]), {"weights": torch.ones(12)})
MICRO_BATCHES = [[0], [1]]
ONE = ParallelSizes()
LEARNED = ["pass of 5", "update", "pass of 5", "update"]
"""Two passes of the first micro-batch alone, whose largest numbers become scales."""
COUNTED = ["pass of 5", "pass of 7"]
TRAINED = ["pass of 5 that trains", "pass of 7 that trains"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"num_hidden_layers": 1}
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("model"), fields=fields)


def passes(rank: int, sizes: ParallelSizes, folder: Path, first: str, recipe: str | None, scale: float | None):
    """Passes and updates in each of two calls of the method `first`."""
    done: list[str] = []
    module = ModuleType("transformer_engine.pytorch.fp8")

    def update(*, forward):
        done.append("update" if forward else "update of gradients")

    module.FP8GlobalStateManager = SimpleNamespace(reduce_and_update_fp8_tensors=update)
    sys.modules["transformer_engine.pytorch.fp8"] = module
    head = "value" if first == "values" else "language_model"
    options = MegatronOptions(sizes, torch.float32, optimizer={"lr": 0.0})
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank, head=head)
    for parameter in model.bare_chunks[0].parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.prepare_training(2)
    # The model is built without: products of 8 bits need a GPU.
    fields = {"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {}
    model._scales = DelayedScales(model.bare_chunks, replace(options, transformer=fields))
    if scale is not None:
        linear = model.bare_chunks[0].decoder.layers[0].mlp.linear_fc1
        linear.fp8_meta = {"scaling_fwd": SimpleNamespace(scale=torch.tensor([1.0, scale]))}

    def note(_model, _args, options):
        tokens = options["packed_seq_params"].max_seqlen_q
        done.append(f"pass of {tokens}" + " that trains" * torch.is_grad_enabled())

    model.bare_chunks[0].register_forward_pre_hook(note, with_kwargs=True)
    of_calls = []
    for _ in range(2):
        if first == "train_step":
            model.train_step(BATCH, MICRO_BATCHES, SftObjective())
        elif first == "log_probs":
            model.log_probs(BATCH, MICRO_BATCHES, temperature=1.0)
        else:
            model.values(BATCH, MICRO_BATCHES)
        of_calls.append(tuple(done))
        done.clear()
    return of_calls


@pytest.mark.parametrize(("first", "counted"), [("log_probs", COUNTED), ("values", COUNTED), ("train_step", TRAINED)])
def test_the_first_pass_that_counts_has_scales(folder: Path, first: str, counted: list[str]) -> None:
    (calls,) = run_ranks(passes, ONE, folder, first, "delayed", 1.0)
    assert calls == [(*LEARNED, *counted), tuple(counted)]


@pytest.mark.parametrize(
    ("recipe", "scale"), [(None, None), ("tensorwise", None), ("delayed", 64.0)], ids=["bf16", "current", "resumed"]
)
def test_none_are_looked_for_where_there_are_some_or_none_are_delayed(
    folder: Path, recipe: str | None, scale: float | None
) -> None:
    (calls,) = run_ranks(passes, ONE, folder, "log_probs", recipe, scale)
    assert calls == [tuple(COUNTED), tuple(COUNTED)]
