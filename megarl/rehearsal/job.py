"""A job: the models that ranks train, the engines, the refit, and what each phase needs of a GPU."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.architectures import read_architecture
from converters.layouts.megatron import megatron_layout
from megarl.algorithms import PolicyObjective
from megarl.cluster.placement.roles import ENGINE, POLICY
from megarl.config.megatron import megatron_options
from megarl.config.pools import take_turns
from megarl.config.trained_model import read_trained_config
from megarl.models.auxiliary import wanted_auxiliary
from megarl.models.policy import check_layout, check_policy, check_prediction_layers
from megarl.rehearsal.distinct_ranks import distinct_ranks
from megarl.rehearsal.engine import RehearsedEngine, check_engine, rehearse_engine
from megarl.rehearsal.need import Gpu, Need, tightest
from megarl.rehearsal.own_process import OwnProcesses
from megarl.rehearsal.phases import (
    RankPairs,
    beside_ranks,
    cache_bytes,
    engine_needs,
    model_needs,
    most_beside,
    refit_needs,
)
from megarl.rehearsal.refit import RehearsedRefit, rehearse_refit, topology_in
from megarl.schema import MegarlConfig

if TYPE_CHECKING:
    from megarl.cluster.placement.placement import NodesByRole
    from megarl.rehearsal.activations import MicroBatchSize
    from megarl.rehearsal.trainer_rank import RankModel, RehearsedRank, StateBytes


@dataclass(frozen=True)
class RehearsedJob:
    """Everything found out about a job."""

    needs: Sequence[Need]
    engine: RehearsedEngine
    refit: RehearsedRefit
    cache_bytes: int
    """Bytes of a worker's KV cache."""

    @property
    def worst(self) -> Need:
        """The need that leaves the least memory free."""
        return tightest(self.needs)

    @property
    def fits(self) -> bool:
        """Whether every GPU has room in every phase."""
        return self.worst.free >= 0


def check_job(config: MegarlConfig, hf_config: Mapping[str, Any], models: "Sequence[RankModel]") -> None:
    """Raise UserError for models or an engine that a run of a checked `config` would refuse before it starts any."""
    policy, *others = models
    check_policy(read_architecture(hf_config), policy.options, config.algorithm)
    for each in others:
        architecture = read_architecture(each.hf_config)
        check_layout(architecture, each.options)
        if each.head == "language_model" and not each.is_frozen:
            check_prediction_layers(architecture, each.options, beside=each.name)
    check_engine(config, hf_config)


def rehearse_job(
    config: MegarlConfig,
    hf_config: Mapping[str, Any],
    models: "Sequence[RankModel]",
    placement: "NodesByRole | None",
    gpu: Gpu,
    gpus_per_node: int,
) -> RehearsedJob:
    """Rehearse every distinct rank of the models, an engine, and the refit between them, of a job that was checked.

    Raises UserError as `rehearse_rank`, `rehearse_engine` and `rehearse_refit` do.
    """
    policy, size = models[0], micro_batch_size(config)
    # Concurrently, as both wait for subprocesses.
    with ThreadPoolExecutor(1) as pool, OwnProcesses() as processes:
        coming = pool.submit(rehearse_engine, config, hf_config, policy.options.params_dtype, gpu.memory, processes)
        found = {rank_model.name: rehearse_model(rank_model, size, processes) for rank_model in models}
        engine = coming.result()
    architecture = policy.architecture().without_mtp
    workers = config.rollout.replicas * engine.workers
    topology = topology_in(placement, (POLICY, ENGINE), policy.options.parallel.world_size, workers, gpus_per_node)
    ranks = [distinct.rank for distinct, _ in found[POLICY]]
    refit = rehearse_refit(config, policy, architecture, engine, topology, ranks)
    needs = job_needs(config, models, found, engine, refit, gpu)
    return RehearsedJob(needs, engine, refit, cache_bytes(engine, gpu))


def job_needs(
    config: MegarlConfig,
    models: "Sequence[RankModel]",
    found: Mapping[str, RankPairs],
    engine: RehearsedEngine,
    refit: RehearsedRefit,
    gpu: Gpu,
) -> list[Need]:
    """The needs of each phase, including what else is on the same GPUs."""
    sharing = config.cluster.sharing()
    takes_turns = take_turns(config)
    policy, ranks = models[0], found[POLICY]
    # A rank and engines that share a GPU permanently.
    engines = round(1 / config.cluster.gpu_share) - 1
    # A share is of the whole GPU, and what an engine keeps free is part of it.
    whole = engines * (engine.taken(gpu) + gpu.kept_free + refit.of_worker + refit.staged)
    of_policy = _by_part(ranks, beside_ranks(refit, takes_turns=takes_turns, whole_engine=whole))
    together = {name: pairs for name, pairs in found.items() if name in sharing}
    needs: list[Need] = []
    for rank_model in models:
        others = _others(rank_model.name, together, lambda state: state.total)
        if rank_model is policy or rank_model.name in together:
            others |= of_policy
        own = found[rank_model.name]
        needs += model_needs(rank_model, own, gpu, most_beside(own, others))
    of_ranks = max(refit.of_ranks.values()) if takes_turns else 0
    needs += engine_needs(engine, refit, gpu, buckets_of_ranks=of_ranks)
    weights = most_beside(ranks, _others(POLICY, together, lambda state: state.weights))
    return [*needs, *refit_needs(policy, ranks, engine, refit, gpu, weights, takes_turns=takes_turns)]


def _others(
    name: str, together: Mapping[str, RankPairs], size_of: "Callable[[StateBytes], int]"
) -> dict[str, dict[int, int]]:
    """Bytes of the other models on every GPU, by its rank; empty for a model that is not `together` with them."""
    return {
        other: {rank: size_of(each.state) for distinct, each in ranks for rank in distinct.ranks}
        for other, ranks in together.items()
        if other != name and name in together
    }


def _by_part(ranks: RankPairs, beside: Mapping[int, Mapping[str, int]]) -> dict[str, dict[int, int]]:
    """Turn `beside`, rank -> part -> bytes for the ranks that were built, into part -> rank -> bytes for all ranks."""
    parts = dict.fromkeys(part for each in beside.values() for part in each)
    return {
        part: {rank: beside[distinct.rank].get(part, 0) for distinct, _ in ranks for rank in distinct.ranks}
        for part in parts
    }


def rank_models(config: MegarlConfig, hf_config: Mapping[str, Any]) -> "list[RankModel]":
    """The policy, with the given config.json, and the other models, which default to the policy's.

    Raises UserError for another model that has a path without a config.json, and is not in configs/models.
    """
    from megarl.rehearsal.trainer_rank import RankModel

    reference = PolicyObjective(config.algorithm).needs_reference
    models = [RankModel(POLICY, hf_config, megatron_options(config), reference=reference)]
    for name, wanted in wanted_auxiliary(config).items():
        is_policy = wanted.path == Path(config.model.path)
        models.append(
            RankModel(
                name,
                hf_config if is_policy else read_trained_config(str(wanted.path), f"{wanted.key}.path", None),
                megatron_options(config, wanted.settings),
                head=wanted.head,
                reference=wanted.keeps_reference,
                is_frozen=not wanted.is_trained,
            )
        )
    return models


def micro_batch_size(config: MegarlConfig) -> "MicroBatchSize":
    """The largest micro-batch: full, with a sequence of maximum prompt and response length."""
    from megarl.rehearsal.activations import MicroBatchSize

    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    # A sequence is not split over micro-batches, whatever its length.
    return MicroBatchSize(max(config.loop.max_tokens_per_micro_batch, longest), longest)


def rehearse_model(rank_model: "RankModel", size: "MicroBatchSize", processes: OwnProcesses) -> RankPairs:
    """Rehearse every distinct rank of a model. Raises UserError as `rehearse_rank` does."""
    parallel = rank_model.options.parallel
    layout = megatron_layout(rank_model.architecture(), parallel, module_names="local")
    distinct = distinct_ranks(layout, parallel)
    function = "megarl.rehearsal.trainer_rank", "rehearse_ranks"
    found: list[RehearsedRank] = processes.call(*function, rank_model, [each.rank for each in distinct], size)
    return list(zip(distinct, found, strict=True))
