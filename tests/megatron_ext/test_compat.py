"""Each workaround for megatron-core, by what goes wrong without it.

Three are tested where the whole model shows them, in test_model.py: experts whose tensor parallelism differs from that
of the rest, and latent attention and selective recompute without Transformer Engine. Workarounds for checkpoints
that are damaged or would run code are tested in test_checkpoint_damage.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.transformer_config import TransformerConfig
from parity import loaded_model
from torch import Tensor

from converters.layouts.megatron import ParallelSizes
from megatron_ext import compat, device
from megatron_ext.optimizer import build_optimizer, wrap_distributed

pytestmark = pytest.mark.skipif(device.has_transformer_engine(), reason="needed without Transformer Engine only")

ONE, DP2 = ParallelSizes(), ParallelSizes(world_size=2)


def test_the_router_computes_without_transformer_engine() -> None:
    compat.install()
    tokens, weight = torch.randn(3, 4), torch.randn(2, 4)
    torch.testing.assert_close(router_gating_linear(tokens, weight, None, torch.float32), tokens @ weight.T)


def output_layers_with_fusion(rank: int, sizes: ParallelSizes) -> list[str]:
    """Errors of making an output layer where a kernel adds up the gradients of others; at first, and then."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        gradient_accumulation_fusion=True,
        use_cpu_initialization=True,
    )
    errors = []
    for prepare in (lambda: None, compat.let_output_layer_go_without_apex):
        prepare()
        try:
            layers.ColumnParallelLinear(8, 16, config=config, init_method=torch.nn.init.zeros_, bias=False)
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_the_output_layer_is_not_asked_for_a_kernel_that_it_never_runs() -> None:
    (errors,) = run_ranks(output_layers_with_fusion, ONE)
    assert "fused_weight_gradient_mlp_cuda module is not found" in errors[0]
    assert errors[1] == ""


class Training:
    """A model and its optimizer, stepped with made-up gradients."""

    def __init__(self, rank: int, sizes: ParallelSizes, folder: Path) -> None:
        self.bare = loaded_model(rank, sizes, folder)
        self.chunks = wrap_distributed(self.bare, {})
        self.optimizer = build_optimizer(self.chunks, {"lr": 1e-2, "clip_grad": 0.0}, torch.float32)

    def step(self, number: int) -> None:
        for parameter in self.bare[0].parameters():
            values = torch.linspace(-1, 1, parameter.numel()) * (number + 1) ** 2 + 0.1 * number
            parameter.main_grad.copy_(values.view_as(parameter))
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.bare[0].named_parameters()}

    def sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.bare[0].sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict({"model": model}, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def load(self, checkpoint: Path) -> None:
        compat.prime_optimizer_state(self.optimizer)
        state = dist_checkpointing.load(self.sharded_state(is_loading=True), str(checkpoint))
        self.bare[0].load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        compat.separate_step_counters(self.optimizer)


def resumed_and_uninterrupted(
    rank: int, sizes: ParallelSizes, folder: Path, checkpoint: Path
) -> list[dict[str, Tensor]]:
    """Weights after four steps, of which a fresh optimizer took the last two, from a checkpoint; and without that."""
    uninterrupted = Training(rank, sizes, folder)
    for number in range(2):
        uninterrupted.step(number)
    dist_checkpointing.save(uninterrupted.sharded_state(is_loading=False), str(checkpoint))
    resumed = Training(rank, sizes, folder)
    resumed.load(checkpoint)
    for number in range(2, 4):
        uninterrupted.step(number)
        resumed.step(number)
    return [resumed.weights(), uninterrupted.weights()]


@pytest.mark.parametrize("sizes", [ONE, DP2], ids=["one rank", "two data-parallel ranks"])
def test_a_resumed_optimizer_takes_the_same_steps(
    sizes: ParallelSizes, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for resumed, uninterrupted in run_ranks(resumed_and_uninterrupted, sizes, tiny_models["qwen3"], checkpoint):
        for name, weight in uninterrupted.items():
            assert torch.equal(resumed[name], weight), name


def primed_and_not(rank: int, sizes: ParallelSizes, folder: Path) -> list[list[dict[str, Tensor]]]:
    """Weights after one and after two steps, with priming before each and without."""
    weights = []
    for prime in (compat.prime_optimizer_state, lambda _optimizer: None):
        training = Training(rank, sizes, folder)
        weights.append([])
        for number in range(2):
            prime(training.optimizer)
            training.step(number)
            weights[-1].append(training.weights())
    return weights


def test_priming_changes_no_step(tiny_models: Mapping[str, Path]) -> None:
    primed, not_primed = run_ranks(primed_and_not, ONE, tiny_models["qwen3"])[0]
    for with_priming, without in zip(primed, not_primed, strict=True):
        for name, weight in without.items():
            assert torch.equal(with_priming[name], weight), name
