"""Phases of a rehearsed job: who is on a GPU with what, and whether that fits."""

from dataclasses import replace

import megarl.rehearsal.fake_world  # noqa: F401 - before anything of Megatron

# isort: split
import pytest
import torch

from converters.layouts.parallel_sizes import ParallelSizes
from megarl.rehearsal.activations import ActivationBytes
from megarl.rehearsal.distinct_ranks import DistinctRank
from megarl.rehearsal.engine import RehearsedEngine
from megarl.rehearsal.job import job_needs
from megarl.rehearsal.need import Gpu, Need, tightest
from megarl.rehearsal.phases import beside_ranks, cache_bytes, engine_needs, model_needs, refit_needs
from megarl.rehearsal.refit import RehearsedRefit
from megarl.rehearsal.trainer_rank import RankModel, RehearsedRank, StateBytes
from megarl.schema import ClusterConfig, MegarlConfig, PoolConfig
from megatron_ext.options.options import MegatronOptions

GPU = Gpu(100, kept_free=10)
TRAINED = RankModel("trainer", {}, MegatronOptions(ParallelSizes(2), torch.bfloat16))
STATE = StateBytes(weights=10, gradients=20, optimizer=30)
RANKS = [(DistinctRank((0, 1), (0,)), RehearsedRank(0, 5, STATE, predictions=3, activations=ActivationBytes(2, 8)))]
ENGINE = RehearsedEngine(
    workers=2,
    weights=25,
    activations=5,
    longest=4,
    longest_tokens=8,
    data_parallel=2,
    share=0.8,
    traces=(),
)
REFIT = RehearsedRefit({0: 6}, of_worker=7)


def by_phase(needs) -> dict[str, Need]:
    return {need.phase: need for need in needs}


def test_on_gpus_of_their_own_each_has_all_of_its_memory_all_the_time() -> None:
    beside = beside_ranks(REFIT, takes_turns=False, whole_engine=0)
    ranks = by_phase(model_needs(TRAINED, RANKS, GPU, beside))
    assert {phase: (need.total, need.free) for phase, need in ranks.items()} == {
        "predictions": (60 + 3 + 6, 21),
        "update": (60 + 8 + 6, 16),
    }
    engine = by_phase(engine_needs(ENGINE, REFIT, GPU, buckets_of_ranks=0))
    assert (engine["longest response"].total, engine["longest response"].room) == (34, 70)
    # All of the share but what is kept free, and the buckets.
    assert (cache_bytes(ENGINE, GPU), engine["rollout"].total, engine["rollout"].room) == (40, 77, 90)
    assert ENGINE.tokens(40) == 160
    (refit,) = refit_needs(TRAINED, RANKS, ENGINE, REFIT, GPU, {}, takes_turns=False)
    assert (refit.role, refit.total) == ("trainer", 66)


def test_colocated_those_whose_turn_it_is_not_have_buckets_alone() -> None:
    beside = beside_ranks(REFIT, takes_turns=True, whole_engine=0)
    assert by_phase(model_needs(TRAINED, RANKS, GPU, beside))["update"].parts["buckets"] == 6 + 7
    assert by_phase(engine_needs(ENGINE, REFIT, GPU, buckets_of_ranks=6))["rollout"].total == 77 + 6
    (refit,) = refit_needs(TRAINED, RANKS, ENGINE, REFIT, GPU, {}, takes_turns=True)
    assert (refit.role, refit.phase) == ("trainer + engine", "refit")
    assert refit.parts == {"weights": 10, "engine": 25, "buckets": 13}


@pytest.mark.parametrize("takes_turns", [True, False])
def test_what_a_worker_stages_is_there_in_every_phase(takes_turns: bool) -> None:
    staging = replace(REFIT, staged=9)
    beside = beside_ranks(staging, takes_turns=takes_turns, whole_engine=0)
    update = by_phase(model_needs(TRAINED, RANKS, GPU, beside))["update"]
    assert update.parts.get("staged values", 0) == 9 * takes_turns
    assert by_phase(engine_needs(ENGINE, staging, GPU, buckets_of_ranks=0))["rollout"].total == 77 + 9
    (refit,) = refit_needs(TRAINED, RANKS, ENGINE, staging, GPU, {}, takes_turns=takes_turns)
    assert refit.total == (10 + 25 + 13 + 9 if takes_turns else 66)


def test_an_engine_that_never_sleeps_is_beside_its_rank() -> None:
    beside = beside_ranks(REFIT, takes_turns=False, whole_engine=30)
    update = by_phase(model_needs(TRAINED, RANKS, GPU, beside))["update"]
    assert (update.parts["engine"], update.free) == (30, -14)


def test_engines_that_share_a_gpu_leave_a_rank_what_their_shares_do_not_cover() -> None:
    config = MegarlConfig(cluster=ClusterConfig(gpu_share=0.34))
    engine = replace(ENGINE, share=0.3)
    needs = job_needs(config, [TRAINED], {"trainer": RANKS}, engine, REFIT, GPU)
    update = by_phase(each for each in needs if each.role == "trainer")["update"]
    assert update.room - update.parts["engine"] == 100 - 10 - 2 * (30 + REFIT.of_worker)


IN_STAGES = ParallelSizes(2, pipeline_model_parallel_size=2)
CRITIC = RankModel("critic", {}, MegatronOptions(IN_STAGES, torch.bfloat16))
CRITIC_RANKS = [
    (DistinctRank((0,), (0,)), RehearsedRank(0, 5, StateBytes(weights=1), 1, ActivationBytes(1, 2))),
    (DistinctRank((1,), (1,)), RehearsedRank(1, 5, StateBytes(weights=3, gradients=4), 1, ActivationBytes(1, 2))),
]


def needs_with_critic(roles: list[str]) -> dict[tuple[str, str, str], Need]:
    """Needs of a job with a critic, of which each of the two ranks is another; `roles` are in a shared pool."""
    pool = PoolConfig(roles, nodes=1, shared=True)
    config = MegarlConfig(cluster=ClusterConfig(pools={"all": pool}))
    found = {"trainer": RANKS, "critic": CRITIC_RANKS}
    needs = job_needs(config, [TRAINED, CRITIC], found, ENGINE, REFIT, GPU)
    return {(need.role, need.phase, need.who): need for need in needs}


def test_models_that_take_turns_with_an_engine_are_all_there_in_their_turn() -> None:
    needs = needs_with_critic(["trainer", "engine", "critic"])
    both, second = "stage 0, 2 ranks", "stage 1, 1 rank"
    # Beside one of the two ranks is the critic's larger part.
    update = needs["trainer", "update", both]
    assert update.parts == {
        "weights": 10,
        "gradients": 20,
        "optimizer": 30,
        "activations": 8,
        "critic": 7,
        "buckets": 13,
    }
    assert needs["critic", "update", second].parts == {
        "weights": 3,
        "gradients": 4,
        "activations": 2,
        "trainer": 60,
        "buckets": 13,
    }
    assert needs["critic", "predictions", second].total == 7 + 1 + 60 + 13
    refit = needs["trainer + engine", "refit", both]
    assert refit.parts == {"weights": 10, "critic": 3, "engine": 25, "buckets": 13}


def test_a_critic_on_gpus_of_its_own_is_beside_nobody() -> None:
    needs = needs_with_critic(["trainer", "engine"])
    assert needs["critic", "update", "stage 1, 1 rank"].parts == {"weights": 3, "gradients": 4, "activations": 2}
    assert not any("critic" in need.parts for need in needs.values())


@pytest.mark.parametrize(
    ("engine", "phase", "free"),
    [
        (replace(ENGINE, longest=45), "longest response", -5),
        (replace(ENGINE, weights=90), "longest response", -29),
        (replace(ENGINE, share=0.99), "rollout", -6),
        # A share of what is not kept free, for weights, keys and values alone.
        (replace(ENGINE, share=0.5, computes_beside=True, longest=30), "longest response", -10),
        (replace(ENGINE, share=0.9, computes_beside=True), "rollout", -3),
    ],
)
def test_an_engine_fits_with_its_longest_response_into_its_share_and_with_that_into_its_gpu(
    engine: RehearsedEngine, phase: str, free: int
) -> None:
    worst = tightest(engine_needs(engine, REFIT, GPU, buckets_of_ranks=0))
    assert (worst.phase, worst.free) == (phase, free)
