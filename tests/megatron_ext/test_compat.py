"""Each workaround for megatron-core, by what goes wrong without it.

Four are tested where the whole model shows them, in test_model.py: experts whose tensor parallelism differs from that
of the rest, experts that get different numbers of tokens by an all-gather, and latent attention and selective recompute
without Transformer Engine. Workarounds for checkpoints
that are damaged or would run code are tested in test_checkpoint_damage.py.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core import optimizer as core_optimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.transformer_config import TransformerConfig
from parity import loaded_model
from torch import Tensor

from converters.layouts.megatron import ParallelSizes
from megatron_ext import compat, device
from megatron_ext.optimizer.optimizer import build_optimizer, wrap_distributed

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


class FusedAdam:
    """Transformer Engine's Adam, as far as it has a state: no more of it can be had without a GPU."""

    def __init__(self, params: list[dict[str, Any]], store_param_remainders: bool, **_options: Any) -> None:
        self.param_groups, self.store_param_remainders = params, store_param_remainders
        self.state: Any = defaultdict(dict)

    def initialize_state(self, parameter: Tensor, store_param_remainders: bool) -> None:
        self.state[parameter] = {"exp_avg": torch.zeros_like(parameter), "has_remainders": store_param_remainders}


def test_states_of_other_types_are_begun_as_transformer_engine_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(adam: Any, config: Any, _scaler: Any, init_state_fn: Any, **_options: Any) -> SimpleNamespace:
        return SimpleNamespace(optimizer=adam, config=config, init_state_fn=init_state_fn)

    monkeypatch.setattr(core_optimizer, "is_te_min_version", lambda *_arguments: True)
    monkeypatch.setattr(core_optimizer, "Adam", FusedAdam, raising=False)
    monkeypatch.setattr(core_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(core_optimizer, "DistributedOptimizer", keep)
    config = core_optimizer.OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    config.use_precision_aware_optimizer = True
    begun, *new = (
        torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)
    )
    optimizer = core_optimizer._get_megatron_optimizer_based_on_param_groups(
        config, [], [{"params": [begun, *new]}], pg_collection=SimpleNamespace(tp=None)
    )
    state = optimizer.optimizer.state
    state[begun] = {"exp_avg": torch.full((2,), 3.0)}
    compat.prime_optimizer_state(optimizer)
    assert state[begun].keys() == {"exp_avg"}
    assert [state[each]["has_remainders"] for each in new] == [True, False]
