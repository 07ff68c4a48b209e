"""A rehearsal counts the memory that a refit's workers allocate, against workers that are connected."""

import megarl.rehearsal.fake_world  # noqa: F401 - before anything of Megatron

# isort: split
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from quantised_specs import SPECS, empty, make_spec
from transfer_scenes import LOOPBACK, shard_of

from converters.layout import Shard
from converters.layouts.traced_layout import LoadTrace
from converters.topology import Topology
from megarl.rehearsal.engine import RehearsedEngine
from megarl.rehearsal.refit import RehearsedRefit, rehearse_refit
from megarl.rehearsal.trainer_rank import RankModel
from megarl.resharding.direct.destination import Destination
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.staging import Staging
from megarl.resharding.direct.transfer_spec import TransferSpec
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.schema import MegarlConfig, RefitConfig, RolloutConfig
from megatron_ext.loopback import open_store
from megatron_ext.options.options import MegatronOptions

TIMEOUT_S = 20.0


def rehearsed(spec: TransferSpec, refit: RefitConfig) -> RehearsedRefit:
    engine = RehearsedEngine(len(spec.traces), 0, 0, 1, 1, 1, 0.5, spec.traces)
    config = MegarlConfig(rollout=RolloutConfig(replicas=spec.replicas, weights="fp8_block"), refit=refit)
    model = RankModel("trainer", {}, MegatronOptions(spec.parallel, torch.bfloat16))
    return rehearse_refit(config, model, spec.architecture, engine, spec.topology, range(spec.parallel.world_size))


def allocated(worker: Destination) -> int:
    """Bytes of the buckets of a connected worker."""
    receivers = [each for each in (worker._from_sources, worker._from_neighbours) if each is not None]
    own = [wire.bucket for each in receivers for wire in getattr(each._endpoint, "_wires", ())]
    own += [each._whole.tensor for each in receivers if each._whole is not None]
    if worker._messages.relays_out:
        own += worker._to_neighbours._endpoint.buckets
    return sum(each.nbytes for each in own)


def of_stage(trace: LoadTrace, *, is_last: bool) -> LoadTrace:
    """The worker of one of two pipeline stages, the last of which has all layers."""
    placements = [each for each in trace.shard.placements if (".layers." in each.hf_name) == is_last]
    shapes = {each.local_name: trace.shard.local_shapes[each.local_name] for each in placements}
    return replace(trace, shard=Shard(shapes, placements))


def test_the_worker_that_stages_most_is_counted() -> None:
    spec = make_spec(*SPECS["one rank to one worker"])
    stages = [of_stage(spec.traces[0], is_last=is_last) for is_last in (False, True)]
    spec = replace(spec, traces=stages, topology=Topology.apart(1, 2))
    found = rehearsed(spec, RefitConfig(transport="tcp", bucket_bytes=spec.bucket_bytes))
    assert [spec.staged_bytes(0), spec.staged_bytes(1)] == [0, found.staged]
    assert found.staged > 0


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    ("name", "topology", "transport"),
    [
        ("two engines whose workers relay", Topology.separate(2, 4, gpus_per_node=4), "tcp"),
        ("two ranks to two workers", Topology.separate(2, 2, gpus_per_node=1), "tcp"),
        ("two ranks to two workers", Topology([0, 0], [0, 1], [0, 0], [2, 3]), "shared_memory"),
    ],
)
def test_workers_allocate_what_a_rehearsal_counts(name: str, topology: Topology, transport: str, delta: bool) -> None:
    family, parallel, workers, replicas, *_ = SPECS[name]
    spec = make_spec(family, parallel, workers, replicas, topology)
    refit = RefitConfig(transport=transport, bucket_bytes=spec.bucket_bytes, delta=delta)
    found = rehearsed(spec, refit)
    senders = []
    for rank in range(spec.parallel.world_size):
        values = {name: each.to(torch.bfloat16) for name, each in shard_of(spec.plan.source, rank, 1).items()}
        senders.append(Sender(rank, spec.outgoing(rank), values, LOOPBACK))
    destinations, staged = [], []
    for rank in range(spec.plan.destination_ranks):
        worker, messages, tensors = rank % workers, spec.incoming(rank), empty(spec.traces[rank % workers])
        staging = Staging(spec.quantised[worker], messages, tensors)
        staged.append(sum(each.nbytes for each in staging.tensors.values()))
        destinations.append(Destination(rank, messages, tensors, staging))
    store = open_store(LOOPBACK, timedelta(seconds=TIMEOUT_S))
    rendezvous = Rendezvous(
        transport,
        b"key",
        [sender.address for sender in senders],
        (store.host, store.port),
        len(destinations),
        TIMEOUT_S,
        [destination.address for destination in destinations],
        with_changes=delta,
    )
    ends = [*senders, *destinations]
    with ThreadPoolExecutor(len(ends)) as pool, ExitStack() as stack:
        for end in ends:
            stack.callback(end.close)
        list(pool.map(lambda end: end.connect(rendezvous), ends))
        assert allocated(destinations[0]) == found.of_worker
        assert max(staged) == found.staged > 0
        own = [sum(bucket.nbytes for bucket in sender._endpoint.buckets) for sender in senders]
        assert own == list(found.of_ranks.values())
