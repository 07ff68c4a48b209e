"""Phases of a step on a GPU: which processes are awake, with how much memory, and which are asleep.

Models and engines that share GPUs take turns (`megarl.cluster.colocation`). In a rollout the policy has only its
buckets there; in predictions and updates the engines have only theirs; in a refit all have their weights. All models
are awake together: while one computes, the state of the others is on the GPU, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeAlias

from megarl.rehearsal.distinct_ranks import DistinctRank
from megarl.rehearsal.engine import RehearsedEngine
from megarl.rehearsal.need import Gpu, Need
from megarl.rehearsal.refit import RehearsedRefit

if TYPE_CHECKING:
    from megarl.rehearsal.trainer_rank import RankModel, RehearsedRank

RankPairs: TypeAlias = "Sequence[tuple[DistinctRank, RehearsedRank]]"
"""Distinct ranks of a model, with the results of their rehearsals."""

_ENGINE = "engine"
_BUCKETS = "buckets"
_STAGED = "staged values"
_CACHE = "keys and values"


def model_needs(
    rank_model: "RankModel",
    ranks: RankPairs,
    gpu: Gpu,
    beside: Mapping[int, Mapping[str, int]],
) -> Iterator[Need]:
    """Yield what the ranks of a model need for predictions and for updates.

    `beside`: rank -> part -> bytes of everything else that is on the rank's GPU during the whole run.
    """
    for distinct, found in ranks:
        state = {name: size for name, size in asdict(found.state).items() if size}
        others, who = beside.get(distinct.rank, {}), say_who(distinct)
        predictions = {**state, "activations": found.predictions, **others}
        yield Need(rank_model.name, "predictions", who, predictions, gpu.room)
        if found.activations is not None:
            kept = found.activations.of_stage(rank_model.options.parallel, distinct.first_stage)
            yield Need(rank_model.name, "update", who, {**state, "activations": kept, **others}, gpu.room)


def engine_needs(engine: RehearsedEngine, refit: RehearsedRefit, gpu: Gpu, *, buckets_of_ranks: int) -> Iterator[Need]:
    """Yield a worker's needs: its share must hold a single sequence of maximum length, and the GPU the whole share.

    `buckets_of_ranks` is the trainer's memory on the same GPU meanwhile.
    """
    who = f"each of {engine.workers} workers" if engine.workers > 1 else "its worker"
    own = {"weights": engine.weights, "activations": engine.activations}
    yield Need(_ENGINE, "longest response", who, {**own, _CACHE: engine.longest}, engine.taken(gpu))
    cache = max(cache_bytes(engine, gpu), engine.longest)
    buckets = {_BUCKETS: refit.of_worker + buckets_of_ranks, **_staged(refit)}
    yield Need(_ENGINE, "rollout", who, {**own, _CACHE: cache, **buckets}, gpu.room)


def refit_needs(
    rank_model: "RankModel",
    ranks: RankPairs,
    engine: RehearsedEngine,
    refit: RehearsedRefit,
    gpu: Gpu,
    beside: Mapping[int, Mapping[str, int]],
    *,
    takes_turns: bool,
) -> Iterator[Need]:
    """Yield what a refit needs: ranks have released everything but their weights, or have their GPUs to themselves.

    `beside` is the memory of other models on a rank's GPU.
    """
    for distinct, found in ranks:
        own = refit.of_ranks[distinct.rank]
        if takes_turns:
            weights = {"weights": found.state.weights, **beside.get(distinct.rank, {})}
            weights |= {"engine": engine.weights, _BUCKETS: own + refit.of_worker, **_staged(refit)}
            yield Need(f"{rank_model.name} + {_ENGINE}", "refit", say_who(distinct), weights, gpu.room)
        else:
            state = {name: size for name, size in asdict(found.state).items() if size}
            yield Need(rank_model.name, "refit", say_who(distinct), {**state, _BUCKETS: own}, gpu.room)


def beside_ranks(refit: RehearsedRefit, *, takes_turns: bool, whole_engine: int) -> dict[int, dict[str, int]]:
    """Other memory on a trainer rank's GPU: buckets of both sides, or a whole engine that never sleeps."""
    asleep = refit.of_worker if takes_turns else 0
    others = {**({"engine": whole_engine} if whole_engine else {}), **(_staged(refit) if takes_turns else {})}
    return {
        rank: {**others, **({_BUCKETS: size + asleep} if size + asleep else {})}
        for rank, size in refit.of_ranks.items()
    }


def _staged(refit: RehearsedRefit) -> dict[str, int]:
    """Values that a worker stages, if any; they stay while it sleeps, like its buckets."""
    return {_STAGED: refit.staged} if refit.staged else {}


def most_beside(ranks: RankPairs, others: Mapping[str, Mapping[int, int]]) -> dict[int, dict[str, int]]:
    """Bytes of others on the GPU of each rank that was built, by name; the maximum over all ranks that it represents.

    Ranks with the same number share a GPU.
    """
    return {
        distinct.rank: {
            name: most for name, each in others.items() if (most := max(each.get(rank, 0) for rank in distinct.ranks))
        }
        for distinct, _ in ranks
    }


def cache_bytes(engine: RehearsedEngine, gpu: Gpu) -> int:
    """Bytes that a worker's share leaves for its KV cache."""
    return engine.room(gpu) - engine.weights


def say_who(each: DistinctRank) -> str:
    """The ranks that a built rank represents: `stages 1 to 6, 192 ranks`."""
    first, last = each.stages[0], each.stages[-1]
    stages = f"stage {first}" if first == last else f"stages {first} to {last}"
    return f"{stages}, {len(each.ranks)} rank{'s' if len(each.ranks) > 1 else ''}"
