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
from megarl.rehearsal.need import Gpu, Need, tightest
from megarl.rehearsal.phases import beside_ranks, cache_bytes, engine_needs, model_needs, refit_needs
from megarl.rehearsal.refit import RehearsedRefit
from megarl.rehearsal.trainer_rank import RehearsedRank, StateBytes, TrainedModel
from megatron_ext.options import MegatronOptions

GPU = Gpu(100, kept_free=10)
TRAINED = TrainedModel("trainer", {}, MegatronOptions(ParallelSizes(2), torch.bfloat16))
STATE = StateBytes(weights=10, gradients=20, optimizer=30)
RANKS = [(DistinctRank(0, 2, (0,)), RehearsedRank(0, 5, STATE, predictions=3, activations=ActivationBytes(2, 8)))]
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
    (refit,) = refit_needs(TRAINED, RANKS, ENGINE, REFIT, GPU, takes_turns=False)
    assert (refit.role, refit.total) == ("trainer", 66)


def test_colocated_those_whose_turn_it_is_not_have_buckets_alone() -> None:
    beside = beside_ranks(REFIT, takes_turns=True, whole_engine=0)
    assert by_phase(model_needs(TRAINED, RANKS, GPU, beside))["update"].parts["buckets"] == 6 + 7
    assert by_phase(engine_needs(ENGINE, REFIT, GPU, buckets_of_ranks=6))["rollout"].total == 77 + 6
    (refit,) = refit_needs(TRAINED, RANKS, ENGINE, REFIT, GPU, takes_turns=True)
    assert (refit.role, refit.phase) == ("trainer + engine", "refit")
    assert refit.parts == {"weights": 10, "engine": 25, "buckets": 13}


def test_an_engine_that_never_sleeps_is_beside_its_rank() -> None:
    beside = beside_ranks(REFIT, takes_turns=False, whole_engine=30)
    update = by_phase(model_needs(TRAINED, RANKS, GPU, beside))["update"]
    assert (update.parts["engine"], update.free) == (30, -14)


@pytest.mark.parametrize(
    ("engine", "phase", "free"),
    [
        (replace(ENGINE, longest=45), "longest response", -5),
        (replace(ENGINE, weights=90), "longest response", -29),
        (replace(ENGINE, share=0.99), "rollout", -6),
    ],
)
def test_an_engine_fits_with_its_longest_response_into_its_share_and_with_that_into_its_gpu(
    engine: RehearsedEngine, phase: str, free: int
) -> None:
    worst = tightest(engine_needs(engine, REFIT, GPU, buckets_of_ranks=0))
    assert (worst.phase, worst.free) == (phase, free)
