"""Recorded experts on real ranks: followed where a replay is asked for and in updates, and nowhere else.

The reference is transformers' model in float64, in one process, whose routers are made to choose the recorded experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.cluster.placement.reservation import reserve
from megarl.cluster.placement.roles import POLICY, trainer_role
from megarl.cluster.ray.runtime import ray_cluster
from megarl.cluster.trainer.batch import Batch, fetch_tensor
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.quickstart.tiny_models import write_tiny_model
from megarl.schema import ClusterConfig
from megarl.stages.update import update
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch
from megatron_ext.routing.routed_experts import Routing

LENGTHS = (7, 2, 11, 5, 9)
ROUTING = Routing(layers=3, topk=2, experts=4)
SIZES = ParallelSizes(world_size=2, expert_model_parallel_size=2)
"""Each rank has sequences of its own, and half of the experts."""
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Reference:
    """One process's log-probs of all tokens, 0 for the first of a sequence, and the norm of the loss's gradient."""

    log_probs: Tensor
    gradient_norm: float


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    # Weights stay as they are, so that every test finds the same.
    options = MegatronOptions(SIZES, torch.float32, optimizer={"lr": 0.0})
    config = ClusterConfig()
    with (
        ray_cluster(config),
        reserve([trainer_role(POLICY, SIZES, config)], config) as seats,
        TrainerGroup(options, config, seats[POLICY], tmp_path_factory.mktemp("logs"), max_tokens=12) as group,
    ):
        group.start()
        group.build(model, None, 4, reference=True)
        yield group


def recorded_experts() -> Tensor:
    """Any two experts of each token in each layer, long[T, layers, topk]: no router's choice."""
    generator = torch.Generator().manual_seed(5)
    return torch.rand(sum(LENGTHS), ROUTING.layers, ROUTING.experts, generator=generator).topk(ROUTING.topk).indices


def ragged(*, recorded: bool) -> RaggedBatch:
    """Sequences with a loss on all tokens but the first, and records of all but the last, which nobody fed."""
    tokens = torch.randint(4, 60, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    weights = torch.cat([torch.tensor([0.0] + [1.0] * (length - 1)) for length in LENGTHS])
    records = None
    if recorded:
        of_sequences = recorded_experts().split(LENGTHS)
        records = [(ROUTING.records(each.numpy()[:-1], len(each)),) for each in of_sequences]
    fields = {"weights": weights / weights.sum()}
    return RaggedBatch(tokens, torch.tensor(LENGTHS), fields, routed_experts=records)


@contextmanager
def routed_to(model: nn.Module, experts: Tensor) -> Iterator[None]:
    """Inside, the routers choose `experts` [L, layers, topk], with weights of their own."""

    def replaced(layer: int) -> object:
        def choose(router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits, _, own = output
            chosen = torch.cat([experts[:-1, layer], own[-1:]])
            probabilities = logits.softmax(-1).gather(1, chosen)
            return logits, probabilities / probabilities.sum(-1, keepdim=True), chosen

        return choose

    hooks = [layer.mlp.gate.register_forward_hook(replaced(number)) for number, layer in enumerate(model.model.layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def reference(folder: Path, *, replayed: bool) -> Reference:
    """Compute it in one process, in float64."""
    whole = ragged(recorded=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    of_sequences = []
    for tokens, experts in zip(whole.tokens.split(LENGTHS), recorded_experts().split(LENGTHS), strict=True):
        if replayed:
            with routed_to(model, experts):
                logits = model(tokens[None]).logits[0]
        else:
            logits = model(tokens[None]).logits[0]
        predicted = (logits[:-1] / TEMPERATURE).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        of_sequences.append(torch.cat([predicted.new_zeros(1), predicted]))
    log_probs = torch.cat(of_sequences)
    (whole.fields["weights"] * -log_probs).sum().backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    norm = float(torch.stack([each.square().sum() for each in gradients]).sum().sqrt())
    return Reference(log_probs.detach().float(), norm)


@pytest.fixture(scope="module")
def by_routers(model: Path) -> Reference:
    return reference(model, replayed=False)


@pytest.fixture(scope="module")
def by_records(model: Path) -> Reference:
    return reference(model, replayed=True)


def log_probs(ranks: TrainerGroup, *, recorded: bool, replay: bool, reference: bool = False) -> Tensor:
    batch = Batch.of(ragged(recorded=recorded))
    return fetch_tensor(ranks.log_probs(batch, temperature=TEMPERATURE, replay=replay, reference=reference))


@pytest.mark.long
def test_predictions_follow_the_records_where_it_is_asked_for(
    ranks: TrainerGroup, by_routers: Reference, by_records: Reference
) -> None:
    # By so much that no rounding hides which of them it was.
    assert (by_records.log_probs - by_routers.log_probs).abs().max() > 0.01
    replayed = log_probs(ranks, recorded=True, replay=True)
    torch.testing.assert_close(replayed, by_records.log_probs, atol=1e-5, rtol=0)
    unrecorded = log_probs(ranks, recorded=False, replay=False)
    torch.testing.assert_close(unrecorded, by_routers.log_probs, atol=1e-5, rtol=0)
    assert torch.equal(log_probs(ranks, recorded=True, replay=False), unrecorded)
    assert torch.equal(log_probs(ranks, recorded=False, replay=True), unrecorded)
    # The reference model was not asked by any engine.
    of_reference = log_probs(ranks, recorded=True, replay=True, reference=True)
    torch.testing.assert_close(of_reference, by_routers.log_probs, atol=1e-5, rtol=0)


def test_the_gradient_of_an_update_goes_through_the_recorded_experts(
    ranks: TrainerGroup, by_routers: Reference, by_records: Reference
) -> None:
    assert by_records.gradient_norm != pytest.approx(by_routers.gradient_norm, rel=0.01)
    for recorded, expected in ((True, by_records), (False, by_routers)):
        batch = Batch.of(ragged(recorded=recorded))
        metrics = update(ranks, [batch], SftObjective(), temperature=TEMPERATURE)
        assert metrics["policy/gradient_norm"] == pytest.approx(expected.gradient_norm, rel=1e-4)
        loss = -float((ragged(recorded=False).fields["weights"] * expected.log_probs).sum())
        assert metrics["sft/loss"] == pytest.approx(loss, abs=1e-5)
        assert ("experts/changed_by_replay" in metrics) == recorded
