"""Prediction layers learn what transformers' would, however the batch is cut; detached, they change nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from parallel_rank import parallel_rank, share_of
from parity import in_huggingface_names
from test_deepseek_models import write_model
from test_router_losses import by_expert
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megarl.models.policy import check_prediction_layers
from megatron_ext.log_probs import LogProbs
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions, MtpTraining
from megatron_ext.packing.packing import MicroBatch, RaggedBatch

LAYERS, FACTOR, TEMPERATURE = 2, 0.3, 0.7
LENGTHS = (9, 2, 17, 1, 12)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Cut(NamedTuple):
    """How the batch is computed: sequences of each micro-batch of each data-parallel rank."""

    training: MtpTraining
    micro_batches: Sequence[Sequence[Sequence[int]]]
    transformer: Mapping[str, Any] = {}
    distributed: Mapping[str, Any] = {}


CUTS: Mapping[str, tuple[ParallelSizes, Sequence[Cut]]] = {
    "one": (
        ParallelSizes(),
        (
            Cut("joint", [[[0, 1, 2, 3, 4]]]),
            Cut("detached", [[[3], [0, 4], [], [2, 1]]], RECOMPUTE),
            Cut("none", [[[1, 0, 2], [3, 4]]]),
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
            Cut("joint", [[[1, 4], [3, 2, 0]]], RECOMPUTE),
            # The last stage's copy of the embedding must not be waited for.
            Cut("detached", [[[4, 3], [0, 2, 1]]], distributed={"overlap_grad_reduce": True}),
        ),
    ),
    "CP2 DP2 EP2": (
        ParallelSizes(world_size=4, context_parallel_size=2, expert_model_parallel_size=2),
        (Cut("joint", [[[4], [1, 3]], [[2, 0], []]]),),
    ),
}


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, 60, (length,), generator=generator) for length in LENGTHS]


def weights() -> list[Tensor]:
    """The first tokens of each sequence are a prompt, and one of the others is not trained on."""
    found = [torch.linspace(0.2, 1, length) * (torch.arange(length) > 1) for length in LENGTHS]
    found[2][7] = 0
    return found


def weighted(predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, None]:
    return -(predictions.log_probs * micro_batch.fields["weights"]).sum(), None


class Found(NamedTuple):
    data_rank: int
    mtp: Tensor | None
    norm: float
    share: dict[str, Tensor]


def results(rank: int, sizes: ParallelSizes, folder: Path, cuts: Sequence[Cut]) -> list[Found]:
    return [_result(rank, sizes, folder, cut) for cut in cuts]


def _result(rank: int, sizes: ParallelSizes, folder: Path, cut: Cut) -> Found:
    checkpoint = HuggingFaceCheckpoint(folder)
    options = MegatronOptions(
        sizes,
        torch.float32,
        transformer={"mtp_loss_scaling_factor": FACTOR, **cut.transformer},
        optimizer={"lr": 0.0, "clip_grad": 1e9},
        distributed={"use_distributed_optimizer": False, **cut.distributed},
        mtp_training=cut.training,
    )
    model = MegatronModel(read_architecture(checkpoint.config), options, rank)
    model.load_huggingface(checkpoint)
    model.prepare_training(2)
    own, places = share_of(cut.micro_batches[parallel_rank().data])
    tokens, of_loss = [sequences()[index] for index in own], [weights()[index] for index in own]
    lengths = torch.tensor([len(each) for each in tokens])
    batch = RaggedBatch(torch.cat(tokens), lengths, {"weights": torch.cat(of_loss)})
    step = model.train_step(batch, places, weighted, temperature=TEMPERATURE)
    share = in_huggingface_names(rank, sizes, folder, model.bare_chunks)
    return Found(parallel_rank().data, step.mtp, step.gradient_norm, share)


class Expected(NamedTuple):
    mtp: Tensor
    policy: dict[str, Tensor]
    """Gradients without any prediction layer."""
    joint: dict[str, Tensor]
    layers: dict[str, Tensor]
    """Gradients of the prediction layers, which the policy's loss does not have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model("deepseek_v3_mtp", folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """By transformers in float64, a sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4.*", r"model\.layers\.5.*"]
    mtp = MtpModel.from_pretrained(model).double()
    mtp.set_experts_implementation("eager")
    policy, losses, hits, counts = 0, torch.zeros(LAYERS, dtype=torch.float64), torch.zeros(LAYERS), torch.zeros(LAYERS)
    for tokens, of_loss in zip(sequences(), weights(), strict=True):
        hidden = model.model(tokens[None]).last_hidden_state
        policy = (
            policy + F.nll_loss(_log_probs(model, hidden)[:-1], tokens[1:], reduction="none") @ of_loss[1:].double()
        )
        for index, layer in enumerate(mtp.layers):
            if len(tokens) < index + 3:
                break
            embedded = mtp.embed_tokens(tokens[None, index + 1 :])
            positions = torch.arange(embedded.shape[1])[None]
            masks = mtp.create_masks_for_mtp_layer(index, embedded, None, positions)
            rotary = mtp.rotary_emb(embedded, position_ids=positions)
            options = {"position_embeddings": rotary, "position_ids": positions, "past_key_values": None, **masks}
            hidden = layer(embedded, hidden[:, :-1], **options)
            log_probs, target = _log_probs(model, hidden)[:-1], tokens[index + 2 :]
            asked = of_loss[index + 2 :] != 0
            losses[index] = losses[index] + F.nll_loss(log_probs, target, reduction="none")[asked].sum()
            hits[index] += (log_probs.argmax(-1) == target)[asked].sum()
            counts[index] += asked.sum()
    # Its embedding and output layer are the model's.
    own = {name: each for name, each in mtp.named_parameters() if name.startswith("layers.")}
    both = {**dict(model.named_parameters()), **own}
    means = losses / counts
    alone = torch.autograd.grad(policy, list(both.values()), retain_graph=True, allow_unused=True)
    joint = torch.autograd.grad(policy + FACTOR / LAYERS * means.sum(), list(both.values()), allow_unused=True)
    of_policy, of_both = (dict(_by_name(both, gradients)) for gradients in (alone, joint))
    layers = {name: each for name, each in of_both.items() if name.startswith(("model.layers.4.", "model.layers.5."))}
    return Expected(torch.stack([means.detach(), hits / counts], dim=1), of_policy, of_both, layers)


def _log_probs(model: Any, hidden: Tensor) -> Tensor:
    return torch.log_softmax(model.lm_head(hidden)[0] / TEMPERATURE, -1)


def _by_name(parameters: Mapping[str, Tensor], gradients: Sequence[Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    for name, gradient in zip(parameters, gradients, strict=True):
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            name = f"model.layers.{4 + int(index)}.{rest}"
        if gradient is not None:
            yield from by_expert(name, gradient)


@pytest.mark.parametrize("name", list(CUTS))
def test_losses_and_gradients_are_those_of_transformers(name: str, folder: Path, expected: Expected) -> None:
    sizes, cuts = CUTS[name]
    of_ranks = run_ranks(results, sizes, folder, cuts)
    for index, cut in enumerate(cuts):
        found = [cuts_of_rank[index] for cuts_of_rank in of_ranks]
        mtp = {each.data_rank: each.mtp for each in found if each.mtp is not None}
        wanted = expected.policy if cut.training == "none" else {**expected.policy, **expected.layers}
        if cut.training == "joint":
            wanted = expected.joint
        if cut.training == "none":
            assert not mtp
        else:
            torch.testing.assert_close(sum(mtp.values()), expected.mtp, atol=1e-5, rtol=0)
        largest = max(float(each.abs().max()) for each in wanted.values())
        assert found[0].share.keys() >= wanted.keys()
        for tensor, own in found[0].share.items():
            got = sum(each.share[tensor] for each in found)
            whole = wanted.get(tensor, torch.zeros(own.shape)).float()
            torch.testing.assert_close(
                got / largest, whole / largest, atol=1e-5, rtol=0, msg=lambda text, n=f"{cut}: {tensor}": f"{n}: {text}"
            )
        counted = expected.joint if cut.training == "joint" else expected.policy
        norm = torch.stack([each.square().sum() for each in counted.values()]).sum().sqrt()
        assert found[0].norm == pytest.approx(float(norm), rel=1e-4)


def test_the_layers_have_a_part_of_their_own_in_the_loss(expected: Expected) -> None:
    """Otherwise the test above would be of little."""
    assert float(expected.mtp[:, 0].min()) > 0.5
    assert max(float(each.abs().max()) for each in expected.layers.values()) > 0.01
    assert not expected.policy.keys() & expected.layers.keys()
    difference = expected.joint["lm_head.weight"] - expected.policy["lm_head.weight"]
    assert float(difference.abs().max()) > 0.01


@pytest.mark.parametrize(
    ("training", "options", "says"),
    [
        ("joint", {"shared_prefixes": True}, "set model.mtp_training=none, or loop.shared_prefixes=false"),
        (
            "none",
            {"distributed": {"overlap_grad_reduce": True}},
            "set model.mtp_training=detached, or leave overlap_gr",
        ),
    ],
)
def test_what_the_layers_cannot_be_trained_with_is_refused(
    training: MtpTraining, options: dict[str, Any], says: str, folder: Path
) -> None:
    architecture = read_architecture(HuggingFaceCheckpoint(folder).config)
    sizes = ParallelSizes(world_size=2, pipeline_model_parallel_size=2)
    given = MegatronOptions(sizes, torch.float32, **options, mtp_training=training)
    with pytest.raises(UserError, match=says):
        check_prediction_layers(architecture, given)
    check_prediction_layers(replace(architecture, mtp_layers=0), given)
    check_prediction_layers(architecture, MegatronOptions(sizes, torch.float32, mtp_training=training))
