"""A rehearsed rank holds what a real one holds, to the byte, and a tensor that the layout does not know is found."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from torch import Tensor

from converters.architectures import Lora, read_architecture
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json, unquantised
from converters.layouts.megatron import ParallelSizes, megatron_layout
from megarl.algorithms import SftObjective
from megarl.config.folder import known_model
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.rehearsal.activations import MicroBatchSize, rehearse_micro_batch
from megarl.rehearsal.alive import Alive
from megarl.rehearsal.distinct_ranks import DistinctRank, distinct_ranks
from megarl.rehearsal.own_process import OwnProcesses
from megarl.rehearsal.trainer_rank import RankModel, RehearsedRank, StateBytes, check_layout, state_bytes
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import AdapterOptions, MegatronOptions
from megatron_ext.packing.packing import RaggedBatch

SIZES = ParallelSizes(
    4,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
)
OPTIONS = MegatronOptions(SIZES, torch.bfloat16, optimizer={"lr": 1e-3})
BATCH = RaggedBatch(torch.arange(4, 16), torch.tensor([5, 7]), {"weights": torch.ones(12)})
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SMALL = MicroBatchSize(tokens=64, longest=48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), fields={"num_hidden_layers": 2})


def rehearse_ranks(trained: RankModel, ranks: Sequence[int], size: MicroBatchSize) -> list[RehearsedRank]:
    return OwnProcesses().call("megarl.rehearsal.trainer_rank", "rehearse_ranks", trained, ranks, size)


@pytest.mark.long
def test_state_is_that_of_real_ranks_after_a_real_step(folder: Path) -> None:
    # As a recipe for GPUs may say; here the modules are local ones.
    kernels = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion")
    fused = dict.fromkeys((*kernels, "gradient_accumulation_fusion"), True)
    options = replace(OPTIONS, transformer={"transformer_impl": "transformer_engine", **fused})
    trained = RankModel("trainer", read_json(folder / CONFIG), options, reference=True)
    rehearsed = rehearse_ranks(trained, range(4), SMALL)
    real = run_ranks(real_state, SIZES, folder)
    assert [each.state for each in rehearsed] == real
    assert all(each.activations.peak > each.activations.kept > 0 for each in rehearsed)
    # Nothing is kept for a backward pass.
    assert all(0 < each.predictions < each.activations.peak for each in rehearsed)


@pytest.mark.long
def test_an_adapter_is_rehearsed_with_its_model(folder: Path) -> None:
    options = replace(OPTIONS, adapter=AdapterOptions(Lora(3, 12.0), seed=7))
    (rank,) = rehearse_ranks(RankModel("trainer", read_json(folder / CONFIG), options), [0], SMALL)
    # Adam keeps 12 bytes for each trained number, six times as many as a weight has.
    assert 0 < rank.state.optimizer < rank.state.weights


def test_moments_on_the_host_are_not_on_the_gpu(folder: Path) -> None:
    ((plain, whole, half),) = run_ranks(states_on_host, ParallelSizes(1), folder)
    # Main parameters stay, of which Adam has two moments each.
    assert 3 * whole.optimizer == plain.optimizer
    assert 0 < half.optimizer - whole.optimizer <= (plain.optimizer - whole.optimizer) / 2
    assert whole.weights == plain.weights
    assert whole.gradients == plain.gradients


def states_on_host(rank: int, sizes: ParallelSizes, folder: Path) -> list[StateBytes]:
    found, offloaded = [], {"optimizer_cpu_offload": True}
    for kind in ({}, offloaded, {**offloaded, "optimizer_offload_fraction": 0.5}):
        options = MegatronOptions(sizes, torch.bfloat16, optimizer={"lr": 1e-3, **kind})
        model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank)
        model.load_huggingface(HuggingFaceCheckpoint(folder))
        model.prepare_training(1)
        model.train_step(BATCH, [[0, 1]], SftObjective())
        found.append(state_bytes(model))
    return found


@pytest.mark.long
def test_gathers_that_overlap_are_left_out_of_a_rehearsal(folder: Path) -> None:
    found = []
    for distributed in ({"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}):
        trained = RankModel("trainer", read_json(folder / CONFIG), replace(OPTIONS, distributed=distributed))
        found += rehearse_ranks(trained, [0], SMALL)
    assert found[0].state == found[1].state


@pytest.mark.long
def test_a_recomputed_layer_keeps_its_input_for_each_micro_batch_in_flight(folder: Path) -> None:
    stages = ParallelSizes(2, pipeline_model_parallel_size=2)
    options = MegatronOptions(stages, torch.bfloat16, optimizer={"lr": 1e-3}, transformer=RECOMPUTE)
    config = read_json(folder / CONFIG)
    few, many = (
        rehearse_ranks(RankModel("trainer", {**config, "num_hidden_layers": layers}, options), [0], SMALL)
        for layers in (2, 6)
    )
    kept = many[0].activations.kept - few[0].activations.kept
    assert kept == 2 * SMALL.tokens * config["hidden_size"] * torch.bfloat16.itemsize


def real_state(rank: int, _sizes: ParallelSizes, folder: Path) -> StateBytes:
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), OPTIONS, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.keep_reference()
    model.prepare_training(1)
    model.train_step(BATCH, [[0, 1]], SftObjective())
    return state_bytes(model)


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [False, True])
def test_state_and_activations_are_those_of_real_ranks_also_with_fsdp2(recomputed: bool, tmp_path: Path) -> None:
    folder = write_tiny_model("qwen3", tmp_path, fields={"num_hidden_layers": 5})
    config, transformer = read_json(folder / CONFIG), RECOMPUTE if recomputed else {}
    found = []
    for sizes in (ParallelSizes(2), ParallelSizes(2, use_torch_fsdp2=True)):
        options = MegatronOptions(sizes, torch.bfloat16, optimizer={"lr": 1e-3}, transformer=transformer)
        rehearsed = rehearse_ranks(RankModel("trainer", config, options), range(2), SMALL)
        assert rehearsed == run_ranks(real_micro_batches, sizes, folder, options)
        found.append(rehearsed[0])
    plain, cut = found
    # Between the passes whole weights are there of what the loss reads: the output layer and the norm before it.
    read_later = (config["vocab_size"] + 1) * config["hidden_size"] * torch.bfloat16.itemsize
    assert cut.activations.kept - plain.activations.kept == read_later
    # In a pass they are there of a layer or two as well, and of no more.
    gathered = cut.predictions - plain.predictions
    assert read_later < gathered < plain.state.weights / 2


@pytest.mark.long
def test_a_rank_without_rows_of_a_small_parameter_is_that_of_the_layout(tmp_path: Path) -> None:
    # FSDP2 gives four rows as two, two and none.
    folder = write_tiny_model("qwen3", tmp_path, fields={"num_hidden_layers": 1, "head_dim": 4, "hidden_size": 32})
    options = MegatronOptions(ParallelSizes(3, use_torch_fsdp2=True), torch.bfloat16, optimizer={"lr": 1e-3})
    first, last = rehearse_ranks(RankModel("trainer", read_json(folder / CONFIG), options), (0, 2), SMALL)
    assert first.state.gradients > last.state.gradients


def real_micro_batches(rank: int, _sizes: ParallelSizes, folder: Path, options: MegatronOptions) -> RehearsedRank:
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.prepare_training(1)
    alive = Alive(Tensor)
    predictions = rehearse_micro_batch(model, SMALL, alive, backward=False)
    activations = rehearse_micro_batch(model, SMALL, alive, backward=True)
    model.train_step(BATCH, [[0, 1]], SftObjective())
    return RehearsedRank(rank, len(model.local_tensors()), state_bytes(model), predictions.peak, activations)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("embedding.word_embeddings.weight", lambda tensor: tensor[1:], r"\[\d+, 96\] of bfloat16 in Megatron"),
        ("embedding.word_embeddings.weight", torch.Tensor.float, "of float32 in Megatron's modules"),
        ("decoder.layers.0.self_attention.extra", lambda _: torch.zeros(2), "not there in the layout"),
    ],
)
def test_a_tensor_that_the_layout_does_not_know_is_found(folder: Path, name: str, change, found: str) -> None:
    trained = RankModel("trainer", read_json(folder / CONFIG), OPTIONS)
    architecture = trained.architecture()
    shard = megatron_layout(architecture, SIZES, module_names="local").shard(0)
    types = architecture.hf_dtypes(torch.bfloat16)
    held = {
        each.local_name: torch.empty(shard.local_shapes[each.local_name], dtype=types[each.hf_name])
        for each in shard.placements
    }
    check_layout(held, "local", trained, SIZES, 0)
    held[name] = change(held.get(name))
    with pytest.raises(UserError, match=rf"rank 0 of trainer: {name}.*{found}"):
        check_layout(held, "local", trained, SIZES, 0)


def test_ranks_with_the_same_part_of_a_model_are_one() -> None:
    architecture = read_architecture({**unquantised(known_model("deepseek_v3")), "num_nextn_predict_layers": 0})
    layers = {"num_layers_in_first_pipeline_stage": 7, "num_layers_in_last_pipeline_stage": 6}
    sizes = ParallelSizes(256, 8, 8, None, 1, 32, 1, **layers)
    assert distinct_ranks(megatron_layout(architecture, sizes, module_names="local"), sizes) == [
        DistinctRank(tuple(range(32)), (0,)),
        DistinctRank(tuple(range(32, 224)), (1, 2, 3, 4, 5, 6)),
        DistinctRank(tuple(range(224, 256)), (7,)),
    ]


@pytest.mark.long
def test_a_rank_of_deepseek_v3_of_256_is_built_and_counted() -> None:
    config = {**unquantised(known_model("deepseek_v3")), "num_nextn_predict_layers": 0}
    layers = {"num_layers_in_first_pipeline_stage": 7, "num_layers_in_last_pipeline_stage": 6}
    sizes = ParallelSizes(256, 8, 8, None, 1, 32, 1, **layers)
    options = MegatronOptions(sizes, torch.bfloat16, optimizer={"lr": 1e-6})
    (rank,) = rehearse_ranks(RankModel("trainer", config, options), [37], SMALL)
    # 8 layers: 8 experts of 256 in each, and an eighth of the rest; states of experts are of this rank alone.
    experts = 8 * 8 * 3 * 7168 * 2048
    assert rank.tensors == 232
    assert 2 * experts < rank.state.weights < 2.3 * experts
    assert 12 * experts < rank.state.optimizer < 12.5 * experts
