"""Routing that is replayed: the same experts, the trainer's own weights of them, however the model is cut."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import run_in_turn, run_ranks
from long_cases import but_long
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from parallel_rank import parallel_rank
from torch import Tensor

from converters.architectures import read_architecture
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.layouts.megatron import ParallelSizes
from megarl.algorithms import SftObjective
from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import device
from megatron_ext.attention.context_parallel import cut
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch, pack
from megatron_ext.routing.routed_experts import Routing
from megatron_ext.routing.router_replay import RecordedChoice, replaying, set_replayed_experts, take_counts

LENGTHS = (8, 4, 12, 6)
ROUTING = Routing(layers=3, topk=2, experts=8)
DEEPSEEK, QWEN = "deepseek_v3", "qwen3_moe"
FIELDS = {
    DEEPSEEK: {"num_hidden_layers": 1 + ROUTING.layers, "n_routed_experts": ROUTING.experts},
    QWEN: {"num_hidden_layers": ROUTING.layers, "num_experts": ROUTING.experts},
}
"""Sigmoids of DeepSeek-V3, whose first layer has no experts and whose routers choose in groups; a softmax of Qwen3."""
RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {
        name: write_tiny_model(name, tmp_path_factory.mktemp(name), fields=fields) for name, fields in FIELDS.items()
    }


def whole_batch(experts: Tensor | None) -> RaggedBatch:
    """All sequences; `experts` [T, layers, topk] are replayed, but for the last token of each, which nobody fed."""
    tokens, lengths = torch.arange(sum(LENGTHS)) % 40 + 4, torch.tensor(LENGTHS)
    batch = RaggedBatch(tokens, lengths, {"weights": torch.ones(len(tokens))})
    if experts is None:
        return batch
    records = [ROUTING.records(each.numpy()[:-1], len(each)) for each in experts.split(LENGTHS)]
    return RaggedBatch(
        tokens,
        lengths,
        batch.fields,
        routed_experts=[(each[: len(each) // 2], each[len(each) // 2 :]) for each in records],
    )


def other_experts() -> Tensor:
    """Any experts [T, layers, topk]: no router's choice."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(sum(LENGTHS), ROUTING.layers, ROUTING.experts, generator=generator)
    return scores.topk(ROUTING.topk).indices


def outcome(
    rank: int, sizes: ParallelSizes, folder: Path, transformer: dict[str, Any], experts: Tensor | None
) -> dict[str, Any]:
    """Predictions of two micro-batches and a train step; of no sequence if its rank has none, or is not the last."""
    model = make_model(rank, sizes, folder, transformer)
    return passes(model, sizes, whole_batch(experts))


def make_model(rank: int, sizes: ParallelSizes, folder: Path, transformer: dict[str, Any]) -> MegatronModel:
    options = MegatronOptions(sizes, torch.float32, transformer=transformer, optimizer={"lr": 0.0})
    model = MegatronModel(read_architecture(read_json(folder / CONFIG)), options, rank)
    model.load_huggingface(HuggingFaceCheckpoint(folder))
    model.prepare_training(5)
    return model


def passes(model: MegatronModel, sizes: ParallelSizes, whole: RaggedBatch) -> dict[str, Any]:
    sequences = range(parallel_rank().data, len(LENGTHS), sizes.data_parallel_size)
    batch, micro_batches = whole.select(sequences), [[index] for index in range(len(sequences))]
    predictions = model.log_probs(batch, micro_batches, temperature=1.0)
    step = model.train_step(batch, micro_batches, SftObjective())
    of_sequences = () if predictions is None else predictions.log_probs.split(batch.lengths.tolist())
    found = dict(zip(sequences, of_sequences, strict=False))
    return {"log_probs": found, "norm": step.gradient_norm, "load": step.expert_load, "replayed": step.replayed}


def in_one_process(rank: int, sizes: ParallelSizes, folder: Path) -> dict[str, Any]:
    """Without a replay, with that of the router's own choice, and with that of others, twice; then without again."""
    model = make_model(rank, sizes, folder, {})
    chosen: dict[int, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(
            lambda router, _, output: chosen.setdefault(router.layer_number, []).append(output[1])
        )
        for module in model.chunks[0].modules()
        if isinstance(module, TopKRouter)
    ]
    results = {"own": passes(model, sizes, whole_batch(None))}
    for hook in hooks:
        hook.remove()
    # First the predictions, behind them the train step.
    of_layers = [torch.cat(maps[: len(LENGTHS)]) for _, maps in sorted(chosen.items())]
    own = torch.stack([each.nonzero()[:, 1].view(-1, ROUTING.topk) for each in of_layers], 1)
    results["own replayed"] = passes(model, sizes, whole_batch(own))
    results["others"] = passes(model, sizes, whole_batch(other_experts()))
    results["others again"] = passes(model, sizes, whole_batch(other_experts()))
    results["own again"] = passes(model, sizes, whole_batch(None))
    return results


@pytest.fixture(scope="module")
def of_models(folders: Mapping[str, Path]) -> Mapping[str, dict[str, Any]]:
    cases = [(in_one_process, ParallelSizes(), folder) for folder in folders.values()]
    return {name: result for name, (result,) in zip(folders, run_in_turn(cases), strict=True)}


@pytest.fixture
def expected(of_models: Mapping[str, dict[str, Any]], model: str) -> dict[str, Any]:
    return of_models[model]


@pytest.mark.parametrize("model", FIELDS)
def test_a_router_that_replays_its_own_choice_changes_no_bit(expected: dict[str, Any]) -> None:
    own = expected["own"]
    assert own["replayed"] is None
    for name in ("own replayed", "own again"):
        replayed = expected[name]
        assert all(torch.equal(log_probs, replayed["log_probs"][i]) for i, log_probs in own["log_probs"].items()), name
        assert replayed["norm"] == own["norm"]
        assert torch.equal(replayed["load"], own["load"])
    tokens = sum(LENGTHS) - len(LENGTHS)
    assert expected["own replayed"]["replayed"].tolist() == [tokens * ROUTING.layers, 0, tokens, 0]


@pytest.mark.parametrize("model", FIELDS)
def test_tokens_go_to_the_experts_of_their_records_and_the_last_ones_where_they_would(expected: dict[str, Any]) -> None:
    others, experts = expected["others"], other_experts()
    recorded = torch.ones(len(experts), dtype=torch.bool)
    recorded[torch.tensor(LENGTHS).cumsum(0) - 1] = False
    for layer in range(ROUTING.layers):
        of_records = torch.bincount(experts[recorded, layer].flatten(), minlength=ROUTING.experts)
        by_the_router = others["load"][-ROUTING.layers :][layer] - of_records
        assert int(by_the_router.min()) >= 0
        assert int(by_the_router.sum()) == ROUTING.topk * len(LENGTHS)
    replayed, changed, tokens, changed_tokens = others["replayed"].tolist()
    assert (replayed, tokens) == (int(recorded.sum()) * ROUTING.layers, int(recorded.sum()))
    assert 0.5 * replayed < changed < replayed
    assert changed / ROUTING.layers < changed_tokens <= tokens
    gaps = [(others["log_probs"][i] - expected["own"]["log_probs"][i]).abs().max() for i in range(len(LENGTHS))]
    assert min(gaps) > 1e-3
    assert all(
        torch.equal(others["log_probs"][i], expected["others again"]["log_probs"][i]) for i in range(len(LENGTHS))
    )


def ranks(tensor: int = 1, pipeline: int = 1, **others: int) -> ParallelSizes:
    """As few ranks as these sizes allow, or two."""
    least = tensor * pipeline * others.get("context_parallel_size", 1)
    return ParallelSizes(max(2, least), tensor, pipeline, **others)


WHOLE_EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
IN_TWO_STAGES = {"num_layers_in_first_pipeline_stage": 1}
CUTS = {
    "one": (DEEPSEEK, ParallelSizes(), "moe"),
    "TP": (DEEPSEEK, ranks(tensor=2), "full"),
    "TP and EP": (DEEPSEEK, ranks(tensor=2, **WHOLE_EXPERTS), None),
    "VPP": (DEEPSEEK, ranks(pipeline=2, virtual_pipeline_model_parallel_size=2), "full"),
    "PP": (DEEPSEEK, ranks(pipeline=2), "moe"),
    "DP and EP": (DEEPSEEK, ranks(expert_model_parallel_size=2), "full"),
    "CP and EP": (DEEPSEEK, ranks(context_parallel_size=2, expert_model_parallel_size=2), "full"),
    "TP, EP and PP": (DEEPSEEK, ranks(tensor=2, pipeline=2, **WHOLE_EXPERTS), None),
    "TP, ETP, EP, PP and DP": (DEEPSEEK, ParallelSizes(8, 2, 2, expert_model_parallel_size=2), "moe"),
    "softmax, TP": (QWEN, ranks(tensor=2), None),
    "softmax, DP and EP": (QWEN, ranks(expert_model_parallel_size=2), "moe"),
    "softmax, TP, EP and PP": (QWEN, ranks(tensor=2, pipeline=2, **WHOLE_EXPERTS, **IN_TWO_STAGES), "full"),
}


@pytest.mark.parametrize("cut", but_long(CUTS, "TP", "TP and EP", "softmax, TP"))
def test_no_cut_and_no_recomputation_changes_what_is_replayed(
    of_models: Mapping[str, dict[str, Any]], folders: Mapping[str, Path], cut: str
) -> None:
    model, sizes, recomputed = CUTS[cut]
    expected = of_models[model]
    transformer = RECOMPUTED[recomputed] if recomputed else {}
    outcomes = run_ranks(outcome, sizes, folders[model], transformer, other_experts())
    others = expected["others"]
    log_probs = {i: each for rank in outcomes for i, each in rank["log_probs"].items()}
    assert sorted(log_probs) == list(range(len(LENGTHS)))
    for i, each in log_probs.items():
        torch.testing.assert_close(each, others["log_probs"][i], atol=1e-5, rtol=0)
    for rank in outcomes:
        assert rank["norm"] == pytest.approx(others["norm"], rel=1e-5)
        assert torch.equal(rank["replayed"], others["replayed"])
        assert torch.equal(rank["load"], others["load"])


@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_the_weights_of_replayed_experts_are_the_routers_and_learn(sigmoid: bool, groups: int | None) -> None:
    experts, topk, tokens = 16, 5, 50
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_router_num_groups=groups,
        moe_router_group_topk=groups and 2,
        moe_router_score_function="sigmoid" if sigmoid else "softmax",
        moe_router_enable_expert_bias=sigmoid,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        perform_initialization=False,
    )
    router = TopKRouter(config=config, pg_collection=SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None))
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, 1, experts, generator=generator, dtype=torch.float64).requires_grad_()
    _, own = router.routing(logits)
    recorded = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    recorded[::7] = -1
    router.router_replay = RecordedChoice()
    router.router_replay.set_experts(recorded)
    weights, chosen = router.routing(logits)
    expected = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, recorded.clamp(min=0), True)
    expected[::7] = own[::7]
    assert torch.equal(chosen, expected)
    scores = logits[:, 0].float().sigmoid().double() if sigmoid else logits[:, 0].exp()
    by_hand = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
    torch.testing.assert_close(weights, by_hand, atol=1e-6, rtol=1e-5)
    upstream = torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
    gradients = [torch.autograd.grad(each, logits, upstream, retain_graph=True)[0] for each in (weights, by_hand)]
    assert float(gradients[0].abs().max()) > 0.01
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def chunk_with(*choices: RecordedChoice) -> Any:
    routers = [SimpleNamespace(router_replay=choice) for choice in choices]
    layers = [SimpleNamespace(mlp=SimpleNamespace(router=router)) for router in routers]
    return SimpleNamespace(decoder=SimpleNamespace(layers=layers))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_device_is_sent_the_records_of_its_tokens_in_its_layers_and_no_others(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    batch, where = whole_batch(other_experts()), torch.device("meta")
    assert batch.routed_experts is not None
    sent: list[Tensor] = []
    monkeypatch.setattr(device, "sent", lambda values, where: sent.append(values) or values.to(where))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: ranks - 1)
    chunk = chunk_with(None)
    chunk.config = SimpleNamespace(
        num_layers=1 + ROUTING.layers,
        moe_layer_freq=[0] + [1] * ROUTING.layers,
        num_moe_experts=ROUTING.experts,
        moe_router_topk=ROUTING.topk,
        sequence_parallel=ranks > 1,
    )
    (router,) = (layer.mlp.router for layer in chunk.decoder.layers)
    router.layer_number = 3
    tokens = sum(LENGTHS)
    micro_batch = pack(batch, range(len(LENGTHS)), align=ranks).to(where)
    for part in (micro_batch, cut(pack(batch, range(len(LENGTHS))), 2, 0, 1).to(where)):
        assert part.routed_experts is not None
        kept = zip(part.routed_experts.arrays, chain(*batch.routed_experts), strict=True)
        assert all(one is other for one, other in kept), "there is one copy"
    set_replayed_experts(chunk, micro_batch)
    (experts,) = sent
    own = other_experts()[:, 1]
    own[torch.tensor(LENGTHS).cumsum(0) - 1] = -1
    assert torch.equal(experts[:, 0].long(), own.chunk(ranks)[-1])
    assert experts.nbytes == tokens // ranks * ROUTING.topk * 2
    assert router.router_replay.target_topk_idx.device == where


OWN, SWAPPED, ONE_OTHER, OTHERS, NOTHING = [0, 1], [1, 0], [0, 2], [2, 3], [-1, -1]
FOLLOWED = (
    ([SWAPPED, ONE_OTHER, NOTHING], [OWN, OWN]),
    ([OWN, OWN, NOTHING], [OWN, OWN]),
    ([OWN, OTHERS, NOTHING], [OWN, ONE_OTHER]),
)
"""By router and micro-batch the records of tokens; each router would choose 0 and 1 of 4 experts."""


def counts_of_a_stage(rank: int, _sizes: ParallelSizes, routers_of_stages: list[list[int]]) -> list[int]:
    choices = [RecordedChoice() for _ in routers_of_stages[rank]]
    for router, choice in zip(routers_of_stages[rank], choices, strict=True):
        for records in FOLLOWED[router]:
            choice.set_experts(torch.tensor(records))
            scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).expand(len(records), -1).clone().requires_grad_()
            choice.get_replay_topk(scores, 2, default_compute_topk=lambda scores, topk, *_: scores.topk(topk))
    chunk = chunk_with(*choices)
    counts = take_counts([chunk], torch.device("cpu"))
    assert not any(choice.followed for choice in choices)
    return counts.tolist()


@pytest.mark.parametrize(
    ("routers_of_stages", "expected"),
    [
        # Four of five tokens have records: the second has other experts in the first and the third layer, the fifth in
        # the third.
        ([[0, 1], [2]], [12, 3, 4, 2]),
        ([[0, 1], []], [8, 1, 4, 1]),
        ([[], [2]], [4, 2, 4, 2]),
    ],
    ids=["both", "the first alone", "the last alone"],
)
def test_a_token_that_any_stage_sends_elsewhere_is_counted_once(
    routers_of_stages: list[list[int]], expected: list[int]
) -> None:
    sizes = ParallelSizes(world_size=2, pipeline_model_parallel_size=2)
    of_ranks = run_ranks(counts_of_a_stage, sizes, routers_of_stages)
    assert [sum(counts) for counts in zip(*of_ranks, strict=True)] == expected


def test_a_record_that_no_router_asked_for_is_no_silence() -> None:
    router = RecordedChoice()
    chunk = chunk_with(router)
    with pytest.raises(RuntimeError, match="left 1 micro-batches"), replaying([chunk]):
        router.set_experts(torch.zeros(3, 2, dtype=torch.long))
    with replaying([chunk]):
        pass
