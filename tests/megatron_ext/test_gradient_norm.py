"""The norm that gradients are clipped by is that of the whole gradient, however the model is cut."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core.post_training.modelopt.layers import Linear as DuplicatedLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from parallel_rank import parallel_rank
from parity import sequences

from converters.architectures import read_architecture
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

ONE = ParallelSizes()
TP2 = {"world_size": 2, "tensor_model_parallel_size": 2}
SIZES = {
    "TP2": (ParallelSizes(**TP2), ("llama", "qwen3", "qwen3_moe", "deepseek_v3")),
    "TP2 ETP1": (ParallelSizes(**TP2, expert_tensor_parallel_size=1), ("qwen3_moe",)),
    "TP2 EP2": (
        ParallelSizes(**TP2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        ("qwen3_moe", "deepseek_v3"),
    ),
    "EP2": (ParallelSizes(world_size=2, expert_model_parallel_size=2), ("qwen3_moe",)),
    "PP2": (ParallelSizes(world_size=2, pipeline_model_parallel_size=2), ("llama", "qwen3")),
}


def norms(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path]) -> dict[str, float]:
    """By model, the norm of the gradient of the summed log-probabilities, as the optimizer takes it."""
    batches = sequences()[0]
    mine = batches[parallel_rank().data :: sizes.data_parallel_size]
    total = sum(len(tokens) for tokens in mine)
    lengths = torch.tensor([len(tokens) for tokens in mine])
    batch = RaggedBatch(torch.cat(mine), lengths, {"weights": torch.ones(total)})
    result = {}
    for name, folder in folders.items():
        checkpoint = HuggingFaceCheckpoint(folder)
        options = MegatronOptions(sizes, torch.float32, optimizer={"lr": 1e-3})
        model = MegatronModel(read_architecture(checkpoint.config), options, rank)
        model.load_huggingface(checkpoint)
        model.prepare_training(1)
        step = model.train_step(batch, [list(range(len(mine)))], SftObjective())
        result[name] = step.gradient_norm
    return result


@pytest.fixture(scope="module")
def of_one_rank(tiny_models: Mapping[str, Path]) -> Mapping[str, float]:
    names = {name for _, names in SIZES.values() for name in names}
    return run_ranks(norms, ONE, {name: tiny_models[name] for name in sorted(names)})[0]


@pytest.mark.parametrize("sizes", list(SIZES))
def test_it_is_that_of_one_rank(sizes: str, tiny_models: Mapping[str, Path], of_one_rank: Mapping[str, float]) -> None:
    parallel, names = SIZES[sizes]
    for rank in run_ranks(norms, parallel, {name: tiny_models[name] for name in names}):
        assert rank == pytest.approx({name: of_one_rank[name] for name in names}, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_checked", [True, False])
def test_one_that_is_no_number_ends_the_run(is_checked: bool, bad: float, tiny_models: Mapping[str, Path]) -> None:
    said, is_changed = run_ranks(train_on_a_bad_weight, ONE, tiny_models["llama"], is_checked, bad)[0]
    assert is_changed is not is_checked
    assert (r"in local grad norm" if is_checked else "check_for_nan_in_grad=false the weights were changed") in said


def train_on_a_bad_weight(
    rank: int, sizes: ParallelSizes, folder: Path, is_checked: bool, bad: float
) -> tuple[str, bool]:
    checkpoint = HuggingFaceCheckpoint(folder)
    distributed = {"check_for_nan_in_grad": is_checked}
    options = MegatronOptions(sizes, torch.float32, optimizer={"lr": 1e-3}, distributed=distributed)
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(1)
    before = {name: tensor.clone() for name, tensor in model.local_tensors().items()}
    batch = RaggedBatch(torch.arange(3), torch.tensor([3]), {"weights": torch.tensor([0.0, bad, 1.0])})
    with pytest.raises(RuntimeError) as refused:
        model.train_step(batch, [[0]], SftObjective())
    return str(refused.value), any(not torch.equal(before[name], t) for name, t in model.local_tensors().items())


def norms_with_marked_projections(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path]) -> dict[str, float]:
    """With down projections marked as Transformer Engine marks the weight of a linear layer without a parallel mode."""
    make = DuplicatedLinear.__init__

    def make_marked(self: DuplicatedLinear, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.parallel_mode = None
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    DuplicatedLinear.__init__ = make_marked
    return norms(rank, sizes, folders)


def test_projections_that_all_ranks_have_count_once(
    tiny_models: Mapping[str, Path], of_one_rank: Mapping[str, float]
) -> None:
    folders = {"deepseek_v3": tiny_models["deepseek_v3"]}
    for rank in run_ranks(norms_with_marked_projections, SIZES["TP2"][0], folders):
        assert rank["deepseek_v3"] == pytest.approx(of_one_rank["deepseek_v3"], rel=1e-5)


def norms_with_overlapped_experts(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path]) -> dict[str, float]:
    """With shared experts as `moe_shared_expert_overlap` leaves Transformer Engine's: cut, without a parallel mode."""
    make = SharedExpertMLP.__init__

    def make_without_mode(self: SharedExpertMLP, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.linear_fc1.parallel_mode = self.linear_fc2.parallel_mode = None

    SharedExpertMLP.__init__ = make_without_mode
    return norms(rank, sizes, folders)


def test_shared_experts_that_overlap_count_on_all_ranks(
    tiny_models: Mapping[str, Path], of_one_rank: Mapping[str, float]
) -> None:
    folders = {"deepseek_v3": tiny_models["deepseek_v3"]}
    for rank in run_ranks(norms_with_overlapped_experts, SIZES["TP2"][0], folders):
        assert rank["deepseek_v3"] == pytest.approx(of_one_rank["deepseek_v3"], rel=1e-5)
