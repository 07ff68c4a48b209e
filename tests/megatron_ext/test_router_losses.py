"""Losses of routers are those of the whole batch, by the formulas written out for transformers, however it is cut."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from launch import run_ranks
from long_cases import but_long
from parallel_rank import parallel_rank, share_of
from parity import in_huggingface_names
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.models.policy import check_routers
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import megatron_model
from megatron_ext.log_probs import LogProbs
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, pack
from megatron_ext.routing.router_balance import routed_tokens
from megatron_ext.routing.router_loss_options import RouterLosses

COEFFICIENTS = {"z_loss": 0.5, "seq_aux_loss": 3.0, "global_aux_loss": 2.0}
OPTIONS = {
    "moe_z_loss_coeff": COEFFICIENTS["z_loss"],
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [COEFFICIENTS["seq_aux_loss"], COEFFICIENTS["global_aux_loss"]],
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = ("qwen3_moe", "deepseek_v3")
PROMPT, TAILS = 18, (5, 0, 11, 3)


class Cut(NamedTuple):
    """How the batch is computed: sequences of each micro-batch of each data-parallel rank."""

    micro_batches: Sequence[Sequence[Sequence[int]]]
    transformer: Mapping[str, Any] = {}
    shared_prefixes: bool = False


CUTS: Mapping[str, tuple[ParallelSizes, Sequence[Cut]]] = {
    "one": (
        ParallelSizes(),
        (
            Cut([[[0, 1, 2, 3, 4]]]),
            Cut([[[3], [0, 4], [], [2, 1]]], RECOMPUTE),
            Cut([[[2, 0, 3], [1, 4]]], shared_prefixes=True),
        ),
    ),
    "TP2 PP2 VPP2": (
        ParallelSizes(
            world_size=4,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
        ),
        (
            Cut([[[1, 4], [3, 2, 0]]], RECOMPUTE),
            Cut([[[4, 3], [0, 2, 1]]], shared_prefixes=True),
        ),
    ),
    "CP2 DP2 EP2": (
        ParallelSizes(world_size=4, context_parallel_size=2, expert_model_parallel_size=2),
        (Cut([[[4], [1, 3]], [[2, 0], []]]),),
    ),
}


def sequences() -> list[Tensor]:
    """Four that begin alike, and one by itself."""
    generator = torch.Generator().manual_seed(5)

    def drawn(length: int) -> Tensor:
        return torch.randint(4, 44, (length,), generator=generator)

    prompt = drawn(PROMPT)
    return [*(torch.cat([prompt, drawn(tail)]) for tail in TAILS), drawn(31)]


def nothing(predictions: LogProbs, _micro_batch: MicroBatch) -> tuple[Tensor, None]:
    return 0 * predictions.log_probs.sum(), None


def results(rank: int, sizes: ParallelSizes, folders: Mapping[str, Path], cuts: Sequence[Cut]) -> list[list[Any]]:
    """The values of the losses and this rank's share of their gradients, of each model under each cut."""
    return [[_result(rank, sizes, folder, cut) for cut in cuts] for folder in folders.values()]


def _result(rank: int, sizes: ParallelSizes, folder: Path, cut: Cut) -> tuple[Mapping[str, float], dict[str, Tensor]]:
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(
        sizes,
        torch.float32,
        transformer={**OPTIONS, **cut.transformer},
        optimizer={"lr": 0.0, "clip_grad": 0.0},
        distributed={"use_distributed_optimizer": False},
        shared_prefixes=cut.shared_prefixes,
    )
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(2)
    own, places = share_of(cut.micro_batches[parallel_rank().data])
    tokens = [sequences()[index] for index in own]
    batch = RaggedBatch(torch.cat(tokens), torch.tensor([len(each) for each in tokens]))
    first = model.train_step(batch, places, nothing)
    second = model.train_step(batch, places, nothing)
    assert second.router_losses == first.router_losses
    return second.router_losses, in_huggingface_names(rank, sizes, folder, model.bare_chunks)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    fields = {"num_hidden_layers": 4}
    return {name: write_tiny_model(name, tmp_path_factory.mktemp(name), fields=fields) for name in MODELS}


class Expected(NamedTuple):
    values: dict[str, float]
    gradients: dict[str, Tensor]


def written_out(folder: Path) -> Expected:
    """The losses of transformers' routers in float64, each expert of each token by itself, and their gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    logits: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda gate, inputs, _output: logits.setdefault(name, []).append(
            inputs[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T
        )

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(keep(name))
    for each in sequences():
        model(each[None])
    topk = model.config.num_experts_per_tok
    layers = [
        _losses(of_layer, topk, is_sigmoid="qwen3" not in model.config.model_type) for of_layer in logits.values()
    ]
    values = {name: torch.stack([each[name] for each in layers]) for name in COEFFICIENTS}
    sum(COEFFICIENTS[name] * each.sum() for name, each in values.items()).backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradients |= {} if parameter.grad is None else dict(by_expert(name, parameter.grad))
    return Expected({name: float(each.mean()) for name, each in values.items()}, gradients)


def by_expert(name: str, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
    """By the names of checkpoints, which have a matrix for each expert."""
    experts, is_of_experts, matrix = name.partition(".experts.")
    if not is_of_experts:
        yield name, gradient
        return
    matrices = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
    for expert, whole in enumerate(gradient):
        for part, values in zip(matrices, whole.chunk(len(matrices)), strict=True):
            yield f"{experts}.experts.{expert}.{part}.weight", values


def _losses(logits: Sequence[Tensor], topk: int, *, is_sigmoid: bool) -> dict[str, Tensor]:
    """The losses of one layer; `logits` [tokens, experts] are those of each sequence."""
    z, by_sequence, counts, scores = [], [], 0, 0
    for each in logits:
        z.append(torch.log(torch.exp(each).sum(1)) ** 2)
        score = torch.sigmoid(each) if is_sigmoid else torch.exp(each)
        score = score / score.sum(1, keepdim=True)
        chosen = torch.zeros(each.shape[1])
        for token in score.tolist():
            for expert in sorted(range(len(token)), key=token.__getitem__)[-topk:]:
                chosen[expert] += 1
        by_sequence.append(each.shape[1] / topk * (chosen * score.sum(0)).sum() / len(each) ** 2)
        counts, scores = counts + chosen, scores + score.sum(0)
    tokens = sum(len(each) for each in logits)
    return {
        "z_loss": torch.cat(z).mean(),
        "seq_aux_loss": torch.stack(by_sequence).mean(),
        "global_aux_loss": logits[0].shape[1] / topk * (counts * scores).sum() / tokens**2,
    }


@pytest.fixture(scope="module")
def expected(folders: Mapping[str, Path]) -> list[Expected]:
    return [written_out(folder) for folder in folders.values()]


@pytest.mark.parametrize("name", but_long(CUTS, "TP2 PP2 VPP2"))
def test_values_and_gradients_are_those_of_the_whole_batch(
    name: str, folders: Mapping[str, Path], expected: Sequence[Expected]
) -> None:
    sizes, cuts = CUTS[name]
    of_ranks = run_ranks(results, sizes, folders, cuts)
    for model, wanted in enumerate(expected):
        largest = max(float(each.abs().max()) for each in wanted.gradients.values())
        assert largest > 0.05
        for cut in range(len(cuts)):
            found = [of_models[model][cut] for of_models in of_ranks]
            for values, _ in found:
                assert values == pytest.approx(wanted.values, abs=1e-5)
            for tensor, gradient in found[0][1].items():
                got = sum(share[tensor] for _, share in found)
                whole = wanted.gradients.get(tensor, torch.zeros(gradient.shape)).float()
                torch.testing.assert_close(
                    got / largest, whole / largest, atol=1e-5, rtol=0, msg=lambda text, n=tensor: f"{n}: {text}"
                )


def frozen(rank: int, sizes: ParallelSizes, folder: Path) -> dict[str, bool]:
    """Whether each of this rank's tensors is what it was before a step."""
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(
        sizes, torch.float32, OPTIONS, optimizer={"lr": 0.1, "weight_decay": 0.1}, freeze_moe_router=True
    )
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(1)
    before = {name: tensor.detach().clone() for name, tensor in model.local_tensors().items()}
    tokens = sequences()[parallel_rank().data]
    model.train_step(RaggedBatch(tokens, torch.tensor([len(tokens)])), [[0]], entropy)
    return {name: torch.equal(tensor, before[name]) for name, tensor in model.local_tensors().items()}


def entropy(predictions: LogProbs, _micro_batch: MicroBatch) -> tuple[Tensor, None]:
    return predictions.entropy.sum(), None


def test_frozen_routers_alone_stay_as_they_were(folders: Mapping[str, Path]) -> None:
    sizes = ParallelSizes(world_size=2, expert_model_parallel_size=2)
    for stayed in run_ranks(frozen, sizes, folders["deepseek_v3"]):
        routers = {name for name in stayed if ".router." in name}
        assert len(routers) == 6
        assert {name for name, is_same in stayed.items() if is_same} == routers
    with pytest.raises(UserError, match=r"moe_router_bias_update_rate=0\.001 changes their bias"):
        MegatronOptions(sizes, torch.float32, {"moe_router_bias_update_rate": 0.001}, freeze_moe_router=True)


def test_routers_of_a_model_that_has_none_are_refused(tmp_path: Path) -> None:
    dense = read_architecture(HuggingFaceCheckpoint(write_tiny_model("qwen3", tmp_path)).config)
    for option, value in OPTIONS.items():
        given = MegatronOptions(ParallelSizes(), torch.float32, {option: value})
        if option == "moe_router_load_balancing_type":
            check_routers(dense, given)
        else:
            with pytest.raises(UserError, match=f"megatron.{option} is for routers, and this qwen3 model has none"):
                check_routers(dense, given)
    with pytest.raises(UserError, match=r"model\.freeze_moe_router is for routers"):
        check_routers(dense, MegatronOptions(ParallelSizes(), torch.float32, freeze_moe_router=True))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
            "asks for aux_loss, .* global_aux_",
        ),
        (
            {"moe_aux_loss_coeff": 0.01},
            "asks for none, which balances nothing: set megatron.moe_router_load_balancing_t",
        ),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": [0.1, 0.2]}, "2 values for 1 of"),
        ({"moe_z_loss_coeff": -0.1}, "moe_z_loss_coeff=-0.1 must not be negative"),
    ],
)
def test_what_no_loss_can_be_made_of_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        RouterLosses.of(options)


def test_coefficients_of_zero_are_no_losses() -> None:
    options = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    assert not RouterLosses.of(options)
    assert RouterLosses.of(OPTIONS).coefficients == COEFFICIENTS


def times_that_tokens_were_chosen(rank: int, sizes: ParallelSizes, folder: Path) -> int:
    """How often a step of two micro-batches works out which tokens routers see."""
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(sizes, torch.float32, transformer={**OPTIONS, **RECOMPUTE}, optimizer={"lr": 0.0})
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(1)
    tokens = torch.cat(sequences())
    lengths = torch.tensor([len(each) for each in sequences()])
    batch = RaggedBatch(tokens, lengths, {"weights": torch.ones(len(tokens))})
    with mock.patch.object(megatron_model, "routed_tokens", wraps=routed_tokens) as chosen:
        model.train_step(batch, [[0, 1, 2], [3, 4]], SftObjective())
    return chosen.call_count


def test_tokens_of_routers_are_chosen_once_and_move_with_their_micro_batch(tiny_models: Mapping[str, Path]) -> None:
    assert run_ranks(times_that_tokens_were_chosen, ParallelSizes(), tiny_models["qwen3_moe"]) == [2]
    micro_batch = pack(RaggedBatch(torch.arange(3), torch.tensor([2, 1])), [0, 1], 4)
    rows, of_sequence, lengths = tokens = routed_tokens(micro_batch, sequence_parallel=False)
    assert (rows.tolist(), of_sequence.tolist(), lengths.tolist()) == ([0, 1, 2], [0, 0, 1], [2, 1])
    moved = replace(micro_batch, routed=tokens).to(torch.device("meta")).routed
    assert moved is not None
    assert {each.device.type for each in moved} == {"meta"}
