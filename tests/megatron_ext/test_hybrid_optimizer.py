"""An optimizer with a part of its state on the host trains as one without, and its checkpoints are like any other's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import run_ranks
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import compat, device
from megatron_ext.checkpoint import checkpoint
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.optimizer.optimizer import build_optimizer
from megatron_ext.options.options import MegatronOptions
from megatron_ext.options.supported_options import check_supported
from megatron_ext.packing.packing import RaggedBatch

EP2 = ParallelSizes(world_size=2, expert_model_parallel_size=2)
OFFLOADED = {"optimizer_cpu_offload": True}
HALF = {**OFFLOADED, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}
KINDS: Mapping[str, Mapping[str, Any]] = {"plain": {}, "all": OFFLOADED, "half": HALF}
SAME = ("all", "half")
OTHER = (("half", "plain"), ("plain", "half"), ("all", "half"))
SAVED_AFTER, STEPS = 2, 4

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Weights]]:
    folder = write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 2})
    return run_ranks(runs, EP2, folder, tmp_path_factory.mktemp("checkpoints"))


def runs(rank: int, sizes: ParallelSizes, folder: Path, root: Path) -> dict[Any, Weights]:
    """Fp32 weights after the last step: by kind of a whole run, or by those before and after its checkpoint."""
    results: dict[Any, Weights] = {}
    for name in KINDS:
        model = made(rank, sizes, folder, name)
        train(model, range(SAVED_AFTER))
        (root / name).mkdir(exist_ok=True)
        checkpoint.save(model, root / name)
        train(model, range(SAVED_AFTER, STEPS))
        results[name] = main_weights(model)
    for source, target in (*((name, name) for name in SAME), *OTHER):
        model = made(rank, sizes, folder, target)
        checkpoint.load(model, root / source)
        train(model, range(SAVED_AFTER, STEPS))
        results[source, target] = main_weights(model)
    return results


def new(
    rank: int, sizes: ParallelSizes, folder: Path, fields: Mapping[str, Any], distributed: Mapping[str, Any]
) -> MegatronModel:
    source = HuggingFaceCheckpoint(folder)
    # Steps follow the size of a gradient, and not its sign alone, which rounding can change.
    optimizer = {"lr": 1e-2, "adam_eps": 1e-2, **fields}
    options = MegatronOptions(sizes, torch.bfloat16, optimizer=optimizer, distributed=distributed)
    model = MegatronModel(read_architecture(source.config), options, rank)
    model.load_huggingface(source)
    return model


def made(rank: int, sizes: ParallelSizes, folder: Path, name: str) -> MegatronModel:
    fields = KINDS[name]
    model = new(rank, sizes, folder, fields, {})
    model.prepare_training(STEPS)
    for part in compat.parts(model.optimizer):
        assert isinstance(part.optimizer, HybridDeviceOptimizer) == ("optimizer_cpu_offload" in fields)
        if fields.get("optimizer_offload_fraction") == 0.5:
            assert part.optimizer.cpu_optimizers
            assert part.optimizer.gpu_optimizer
    return model


def train(model: MegatronModel, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(4, 60, (30,), generator=generator)
        batch = RaggedBatch(tokens, torch.tensor([9, 4, 17]), {"weights": torch.full((30,), 1 / 60)})
        model.train_step(batch, [[0, 1], [2]], SftObjective())


def main_weights(model: MegatronModel) -> Weights:
    parts = checkpoint.main_states(model.optimizer)
    names = {id(tensor): name for name, tensor in model.local_tensors().items()}
    return {names[id(part.weight)]: part.tensors["param"].float().clone() for part in parts}


@pytest.mark.parametrize("name", SAME)
def test_a_part_on_the_host_changes_no_step(name: str, found: list[dict[Any, Weights]]) -> None:
    for weights in found:
        assert_near(weights[name], weights["plain"])


@pytest.mark.parametrize("name", SAME)
def test_a_continued_run_is_the_uninterrupted_one(name: str, found: list[dict[Any, Weights]]) -> None:
    for weights in found:
        assert weights[name].keys() == weights[name, name].keys()
        for key, expected in weights[name].items():
            assert torch.equal(weights[name, name][key], expected), key


@pytest.mark.parametrize("pair", OTHER)
def test_a_checkpoint_goes_on_with_another_optimizer(pair: tuple[str, str], found: list[dict[Any, Weights]]) -> None:
    for weights in found:
        assert_near(weights[pair], weights[pair[1]])


def assert_near(got: Weights, expected: Weights) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=2e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("in_fp32", [True, False])
def test_what_it_keeps_on_the_gpu_goes_to_the_host_before_and_after_each_step(tmp_path: Path, in_fp32: bool) -> None:
    folder = write_tiny_model("qwen3", tmp_path / "model", fields={"num_hidden_layers": 2})
    for stayed, moved in run_ranks(stayed_and_moved, ParallelSizes(world_size=2), folder, in_fp32):
        assert stayed.keys() == moved.keys()
        for name, tensor in stayed.items():
            assert torch.equal(moved[name], tensor), name


def stayed_and_moved(rank: int, sizes: ParallelSizes, folder: Path, in_fp32: bool) -> list[Weights]:
    """Main parameters of two runs with fp32 copies of weights in bf16, one of which moves before and after steps."""
    fields = {**OFFLOADED, "optimizer_offload_fraction": 0.5, "use_precision_aware_optimizer": True}
    found = []
    for moves in (False, True):
        model = new(rank, sizes, folder, fields, {"grad_reduce_in_fp32": in_fp32})
        with (
            mock.patch.object(device, "has_transformer_engine", return_value=True),
            mock.patch.object(optimizer_config, "is_te_min_version", return_value=True),
        ):
            model.prepare_training(STEPS)
        for step in range(STEPS):
            if moves:
                model.offload(["training"])
                assert left_on_the_gpu(model) == []
                model.reload(["training"])
            train(model, range(step, step + 1))
        found.append(main_weights(model))
    return found


def left_on_the_gpu(model: MegatronModel) -> list[torch.Size]:
    (part,) = compat.parts(model.optimizer)
    copies = [
        copy
        for weight, copy in part.optimizer.param_to_fp32_param.items()
        if weight not in part.optimizer.gpu_params_map_cpu_copy
    ]
    assert copies
    tensors = [*copies, *(copy.grad for copy in copies if copy.grad is not None)]
    return [each.shape for each in tensors if each.untyped_storage().nbytes() > 1024]


def test_what_it_does_not_work_with_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"optimizer_cpu_offload works only with megatron\.use_distributed_optimizer=true"
    ):
        check_supported({"optimizer_cpu_offload": True, "use_distributed_optimizer": False})
    with pytest.raises(UserError, match="use_precision_aware_optimizer=true needs Transformer Engine"):
        build_optimizer([], {"use_precision_aware_optimizer": True}, torch.bfloat16)
    with pytest.raises(UserError, match=r"optimizer_cpu_offload=true needs model\.dtype=bf16"):
        MegatronOptions(EP2, torch.float32, optimizer=OFFLOADED)
