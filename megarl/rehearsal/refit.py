"""The refit of a job: planned between the trainer's layout and the recorded behaviour of the engine's loader."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.architectures import Architecture
from converters.cost import formats, traffic
from converters.topology import Topology
from megarl.refit.direct import topology_of
from megarl.rehearsal.engine import RehearsedEngine, quantisation
from megarl.resharding.direct.messages_by_peer import largest_bytes
from megarl.resharding.direct.quantised_shard import CutBlocksError
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports import MAPPED_MEMORY_TRANSPORT
from megarl.resharding.direct.transports.endpoint import BUCKETS
from megarl.schema import MegarlConfig, RefitConfig

if TYPE_CHECKING:
    from megarl.cluster.placement.placement import NodesByRole
    from megarl.rehearsal.trainer_rank import RankModel


@dataclass(frozen=True)
class RehearsedRefit:
    """Bytes of a refit: buckets on both sides, and data moved."""

    of_ranks: Mapping[int, int]
    """Rank of the trainer -> bytes of its buckets, for some ranks."""
    of_worker: int
    """Buckets of an engine's worker, including those for relaying to its neighbours."""
    staged: int = 0
    """Values that the worker with most stages, as cuts of the trainer go through blocks of the engine's number format.
    """
    sent: int = 0
    """Bytes from the trainer to all engines."""
    relayed: int = 0
    """Bytes from worker to worker."""
    busiest: int = 0
    """Bytes from the rank that sends most."""
    why_not_direct: str = ""
    """Why no direct refit was planned; empty if one was.

    If the engine could not be examined here, the buckets have their full size; else no GPU has any.
    """


def rehearse_refit(
    config: MegarlConfig,
    rank_model: "RankModel",
    architecture: Architecture,
    engine: RehearsedEngine,
    topology: Topology,
    ranks: Iterable[int],
) -> RehearsedRefit:
    """Plan the refit, with the buckets of some ranks. Raises UserError if trainer and engine differ in the model."""
    ranks = list(ranks)
    if not config.lora.merge:
        return RehearsedRefit(dict.fromkeys(ranks, 0), 0, why_not_direct="the adapter goes alone, into a slot")
    if config.refit.path == "loader":
        return RehearsedRefit(dict.fromkeys(ranks, 0), 0, why_not_direct="refit.path is loader")
    if not engine.traces:
        # An engine that cannot be examined here may still be written to directly in a run.
        most = BUCKETS * config.refit.bucket_bytes
        of_worker = worker_bytes(config.refit.bucket_bytes, 0, topology, config.refit)
        return RehearsedRefit(dict.fromkeys(ranks, most), of_worker, why_not_direct=engine.why_not_direct)
    chosen = quantisation(config.rollout, rank_model.options.params_dtype)
    spec = TransferSpec(
        architecture,
        rank_model.options.parallel,
        "local",
        engine.traces,
        config.rollout.replicas,
        topology,
        config.refit.bucket_bytes,
        chosen,
    )
    try:
        spec.check(architecture.hf_dtypes(rank_model.options.params_dtype))
        arriving = spec.incoming(0)
    except CutBlocksError as error:
        return RehearsedRefit(dict.fromkeys(ranks, 0), 0, why_not_direct=str(error))
    number_format = chosen.number_format if chosen else None
    dtype = rank_model.options.params_dtype
    moved = traffic(spec.plan, formats(architecture, number_format=number_format, dtype=dtype))
    return RehearsedRefit(
        {rank: BUCKETS * largest_bytes(spec.outgoing(rank)) for rank in ranks},
        worker_bytes(largest_bytes(arriving.direct), largest_bytes(arriving.relays_out), topology, config.refit),
        int(moved.staged.max()),
        int(moved.direct.sum()),
        int(moved.relayed.sum()),
        int(moved.direct.sum(axis=1).max()),
    )


def worker_bytes(received: int, relayed: int, topology: Topology, refit: RefitConfig) -> int:
    """Buckets of a worker whose largest messages from ranks and to its neighbours have `received` and `relayed` bytes.

    It has none for what it reads from memory that both sides map.
    """
    is_mapped = refit.transport in ("auto", *MAPPED_MEMORY_TRANSPORT.values())
    on_one_machine = len({*topology.source_node, *topology.destination_node}) == 1
    own = 0 if is_mapped and on_one_machine else BUCKETS
    # Changes are applied in one more.
    return (own + refit.delta) * received + BUCKETS * relayed


def topology_in(
    placement: "NodesByRole | None", roles: Sequence[str], ranks: int, workers: int, gpus_per_node: int
) -> Topology:
    """The machines of the ranks and all engines' workers; without a placement, they are on separate machines."""
    if placement is None:
        return Topology.separate(ranks, workers, gpus_per_node)
    trainer, engines = ([node.id for node in placement[role]] for role in roles)
    # All processes of an engine have equally many workers.
    return topology_of(trainer, [node for node in engines for _ in range(workers // len(engines))])
