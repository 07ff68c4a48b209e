"""Each workaround for megatron-core and Transformer Engine, by what goes wrong without it.

Here, or where a whole model shows it.
"""

import inspect
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core import optimizer as core_optimizer
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.transformer_config import TransformerConfig
from parity import loaded_model
from torch import Tensor

from converters.layouts.megatron import ParallelSizes
from megatron_ext import compat, device, transformer_engine_compat
from megatron_ext.optimizer.optimizer import build_optimizer, wrap_distributed

pytestmark = pytest.mark.skipif(device.has_transformer_engine(), reason="needed without Transformer Engine only")

ONE, DP2 = ParallelSizes(), ParallelSizes(world_size=2)
FAILING_WITHOUT = {
    "let_output_layer_go_without_apex": (
        "test_compat::test_the_output_layer_is_not_asked_for_a_kernel_that_it_never_runs"
    ),
    "let_routers_multiply_as_torch": "test_compat::test_the_router_multiplies_float32_as_such",
    "let_latent_attention_go_without_transformer_engine": "test_model::test_logits_equal_those_of_transformers",
    "let_selective_recompute_go_without_transformer_engine": (
        "test_recompute::test_recompute_changes_no_gradient_and_keeps_less"
    ),
    "gather_different_numbers_of_tokens": "test_model::test_experts_get_different_numbers_of_tokens_by_allgather",
    "look_positions_up_in_tables_of_few_lengths": (
        "test_rotary::test_positions_are_looked_up_in_tables_that_several_lengths_share"
    ),
    "drop_rotary_tables": "test_compat::test_tables_of_positions_are_forgotten",
    "drop_routes_of_tokens": "test_offload::test_routes_of_tokens_go_with_the_weights",
    "rotate_latent_queries_in_one_warp": (
        "test_latent_rotation::test_a_gpu_reads_all_that_it_rotates_in_place_before_it_writes"
    ),
    "rotate_latent_heads_in_whole_blocks": "test_latent_rotation::test_blocks_of_heads_are_full",
    "rotate_latent_heads_of_many_tokens": "test_latent_rotation::test_tokens_are_found_behind_2_31_numbers",
    "config_of_variable_lengths": "test_model::test_experts_get_different_numbers_of_tokens_by_allgather",
    "shard_on_this_device": "test_fully_sharded::test_an_update_is_that_of_one_rank",
    "load_checkpoints_without_running_their_code": (
        "test_checkpoint_damage::test_every_rank_refuses_what_is_damaged_and_nobody_runs_code"
    ),
    "user_error_of_any_rank": "test_checkpoint_damage::test_every_rank_refuses_what_is_damaged_and_nobody_runs_code",
    "prime_optimizer_state": "test_compat::test_priming_gives_all_a_state_and_changes_no_step",
    "initialise_in_other_types": "test_compat::test_states_of_other_types_are_begun_as_transformer_engine_wants_it",
    "drop_quantised_weights": "test_offload::test_quantised_copies_go_with_the_weights",
    "set_steps": "test_checkpoint::test_a_run_goes_on_at_another_layout",
    "mark_expert_parameters": "test_model::test_experts_without_tensor_parallelism_get_their_whole_gradient",
    "mark_tensor_parallel_parameters": "test_gradient_norm::test_it_is_that_of_one_rank",
    "unmark_duplicated_parameters": "test_gradient_norm::test_projections_that_all_ranks_have_count_once",
    "leave_out_empty_tensors": (
        "test_value_head::test_a_rank_without_the_head_updates_its_rows_in_the_optimizer_that_a_gpu_has"
    ),
}
"""Workaround -> a test that fails without it."""
NO_WORKAROUNDS = {"install", "parts"}


def test_every_workaround_has_a_test_that_fails_without_it() -> None:
    own = {
        name
        for module in (compat, transformer_engine_compat)
        for name, each in inspect.getmembers(module, inspect.isfunction)
        if each.__module__ == module.__name__
    }
    assert {name for name in own if not name.startswith("_")} == FAILING_WITHOUT.keys() | NO_WORKAROUNDS
    for place in FAILING_WITHOUT.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in Path(__file__).with_name(f"{file}.py").read_text(), place


def in_tf32(weight: Tensor, tokens: Tensor, *_arguments: Any, **_options: Any) -> list[Tensor]:
    """As Transformer Engine multiplies float32 numbers: with 10 bits of their mantissas."""
    rounded = [(each.view(torch.int32) & ~0x1FFF).view(torch.float32) for each in (weight, tokens)]
    return [rounded[1] @ rounded[0].T]


@pytest.mark.parametrize("has_transformer_engine", [False, True])
def test_the_router_multiplies_float32_as_such(has_transformer_engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_transformer_engine", lambda: has_transformer_engine)
    # Put back when the test ends.
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(moe_utils, "te_general_gemm", in_tf32, raising=False)
    if not has_transformer_engine:
        del moe_utils.te_general_gemm
    compat.install()
    tokens, weight = torch.randn(3, 4), torch.randn(2, 4)
    product = router_gating_linear(tokens, weight, None, torch.float32)
    torch.testing.assert_close(product, tokens @ weight.T, atol=1e-6, rtol=0)


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


def test_beside_a_gpu_megatron_core_itself_puts_parameters_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def original() -> None:
        """Stands for megatron-core's own."""

    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", original)
    for gpus, is_original in ((1, True), (0, False)):
        monkeypatch.setattr(device, "gpus", lambda gpus=gpus: gpus)
        compat.install()
        assert (HybridDeviceOptimizer._get_sub_optimizer_param_groups is original) == is_original


def tables_of_one_length(_rank: int, _sizes: ParallelSizes) -> tuple[bool, bool]:
    """Whether a table is the one that was made before; at first, and after these were dropped."""
    rotary = RotaryEmbedding(kv_channels=4, rotary_percent=1.0, use_cpu_initialization=True)
    table = rotary(8)
    is_kept = rotary(8) is table
    compat.drop_rotary_tables()
    return is_kept, rotary(8) is table


def test_tables_of_positions_are_forgotten() -> None:
    assert run_ranks(tables_of_one_length, ONE) == [(True, False)]


class Training:
    """A model and its optimizer, stepped with made-up gradients."""

    def __init__(self, rank: int, sizes: ParallelSizes, folder: Path) -> None:
        self.bare = loaded_model(rank, sizes, folder)
        self.chunks = wrap_distributed(self.bare, {}, fully_sharded=False)
        self.optimizer = build_optimizer(self.chunks, {"lr": 1e-2, "clip_grad": 0.0}, torch.float32)

    def step(self, number: int) -> None:
        for parameter in self.bare[0].parameters():
            values = torch.linspace(-1, 1, parameter.numel()) * (number + 1) ** 2 + 0.1 * number
            parameter.main_grad.copy_(values.view_as(parameter))
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.bare[0].named_parameters()}


def primed_and_not(rank: int, sizes: ParallelSizes, folder: Path) -> list[tuple[int, list[dict[str, Tensor]]]]:
    """Parameters that have a state before the first step, and weights after one and after two steps.

    With priming before each step, and without.
    """
    found = []
    for prime in (compat.prime_optimizer_state, lambda _optimizer: None):
        training = Training(rank, sizes, folder)
        prime(training.optimizer)
        with_state = sum(bool(state) for state in training.optimizer.optimizer.state.values())
        weights = []
        for number in range(2):
            prime(training.optimizer)
            training.step(number)
            weights.append(training.weights())
        found.append((with_state, weights))
    return found


def test_priming_gives_all_a_state_and_changes_no_step(tiny_models: Mapping[str, Path]) -> None:
    (with_state, primed), (without_state, not_primed) = run_ranks(primed_and_not, ONE, tiny_models["qwen3"])[0]
    assert (with_state, without_state) == (len(primed[0]), 0)
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


def test_experts_whose_weights_nobody_marked_count_on_all_tensor_parallel_ranks() -> None:
    """As Transformer Engine leaves those of grouped layers from 2.13 on."""
    grouped, router = torch.nn.Module(), torch.nn.Module()
    grouped.weight0, grouped.weight1, router.weight = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    layer = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"linear_fc1": grouped}), "router": router})
    compat.mark_tensor_parallel_parameters([torch.nn.ModuleDict({"mlp": layer})])
    second = SimpleNamespace(rank=lambda: 1)
    counted = [layers.param_is_not_tensor_parallel_duplicate(each, second) for each in layer.parameters()]
    assert counted == [True, True, False]


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
