"""Relays: bytes that several ranks of a node want enter it once, and are relayed."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_configs import make_config
from transfer_scenes import STEP, Scene

from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.traced_layout import LoadTrace
from converters.topology import Topology
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.messages_by_peer import DestinationMessages, incoming, outgoing
from megarl.resharding.direct.relay_readiness import RelayReadiness
from megarl.resharding.direct.transfer_spec import TransferSpec

TWO_ENGINES = Scene(
    make_config("qwen3"),
    ParallelSizes(world_size=2, tensor_model_parallel_size=2),
    replicas=2,
    transport="tcp",
    topology=Topology.separate(2, 4, gpus_per_node=4),
)
SCENES = {
    "two engines of two workers on a node": TWO_ENGINES,
    "the same with GPUs": replace(TWO_ENGINES, transport="rdma", played_cuda=True),
    # Each holds everything.
    "three engines of one worker on two nodes": replace(
        TWO_ENGINES,
        config=make_config("qwen3_moe"),
        source=ParallelSizes(world_size=2, expert_model_parallel_size=2),
        workers=1,
        replicas=3,
        transport="shared_memory",
        topology=Topology.separate(2, 3, gpus_per_node=2),
    ),
    # A rank that relays, a neighbour, and one that is with the sources.
    "an engine beside the trainer": replace(
        TWO_ENGINES,
        workers=1,
        replicas=3,
        transport="shared_memory",
        topology=Topology([0, 0], [0, 1], [1, 1, 0], [2, 3, 4]),
    ),
}


def messages_of(scene):
    ranks = range(scene.plan.destination_ranks)
    return [incoming(scene.plan, rank, scene.dtypes, scene.bucket_bytes) for rank in ranks]


@pytest.mark.parametrize("name", SCENES)
def test_every_refit_brings_all_weights_of_its_version(set_up, name):
    stage = set_up(SCENES[name])
    stage.connect()
    for version in (0, 1, 2):
        sent = stage.bytes_of_refit(version)
    direct = [messages.direct for messages in messages_of(stage.scene)]
    assert sent == sum(message.size_bytes for each in direct for messages in each.values() for message in messages)


@pytest.mark.parametrize("name", SCENES)
def test_changes_are_relayed_whole(set_up, name):
    stage = set_up(SCENES[name])
    stage.connect(with_changes=True)
    sent = stage.bytes_of_refit(2)
    assert stage.bytes_of_refit(2 + STEP) < 0.4 * sent


@pytest.mark.parametrize("name", SCENES)
def test_what_a_node_needs_enters_it_once(name):
    scene = SCENES[name]
    plan, topology = scene.plan, scene.topology
    entering = Counter()
    for rank, each in enumerate(messages_of(scene)):
        for messages in each.direct.values():
            pieces = [piece for message in messages for piece in message.pieces]
            entering[topology.destination_node[rank]] += sum(piece.size_bytes for piece in pieces)
    for node in set(topology.destination_node) - set(topology.source_node):
        wanted = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in plan.destination.hf_shapes.items()}
        for rank in range(plan.destination_ranks):
            if topology.destination_node[rank] == node:
                for placement in plan.destination.placements(rank % scene.workers):
                    wanted[placement.hf_name][placement.hf_box.slices()] = True
        assert entering[node] == sum(int(each.sum()) for each in wanted.values()) * scene.dtype.itemsize


def reordered(layout):
    """The workers have their tensors in different orders."""

    def shard_of(worker):
        shard = layout.shard(worker)
        return replace(shard, placements=random.Random(worker).sample(shard.placements, len(shard.placements)))

    return replace(layout, shard_of=shard_of, only=None)


@pytest.mark.parametrize("name", SCENES)
def test_both_ends_of_a_relay_derive_the_same_messages(name):
    scene = SCENES[name]
    plan = replace(scene.plan, destination=reordered(scene.plan.destination))
    kinds = (torch.float32, torch.bfloat16)
    dtypes = [dict.fromkeys(each, kinds[worker]) for worker, each in enumerate(scene.dtypes)]
    every = [incoming(plan, rank, dtypes, scene.bucket_bytes) for rank in range(plan.destination_ranks)]
    out = {(rank, to): messages for rank, each in enumerate(every) for to, messages in each.relays_out.items()}
    assert out
    assert out == {(of, rank): messages for rank, each in enumerate(every) for of, messages in each.relays_in.items()}


def masks(shapes, messages, box_of):
    """Which elements of which tensors are in each of the messages."""
    found = {}
    for key, message in messages.items():
        found[key] = {name: torch.zeros(shapes[name], dtype=torch.bool) for name, _ in map(box_of, message.pieces)}
        for name, box in map(box_of, message.pieces):
            found[key][name][box.slices()] = True
    return found


@cache
def coming_and_leaving(rank):
    scene = replace(TWO_ENGINES, bucket_bytes=2000)
    messages, shapes = messages_of(scene)[rank], scene.plan.destination.local_shapes(rank % scene.workers)
    coming = masks(shapes, numbered(messages.direct), lambda piece: (piece.destination_name, piece.destination_box))
    leaving = masks(shapes, numbered(messages.relays_out), lambda piece: (piece.source_name, piece.source_box))
    return messages, coming, leaving


def numbered(messages):
    return {(peer, number): message for peer, messages in messages.items() for number, message in enumerate(messages)}


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_nothing_is_passed_on_before_it_is_there(data):
    messages, coming, leaving = coming_and_leaving(data.draw(st.integers(0, 3)))
    readiness = RelayReadiness(messages)
    for order in (data.draw(st.permutations(list(coming))), list(coming)):
        readiness.expect()
        waiting, here = data.draw(st.permutations(list(leaving))), {}
        for incoming_ in order:
            readiness.add(incoming_)
            for name, mask in coming[incoming_].items():
                here[name] = here[name] | mask if name in here else mask
            ready = [
                each
                for each in waiting
                if all(name in here and not (mask & ~here[name]).any() for name, mask in leaving[each].items())
            ]
            for each in ready:
                assert next(readiness.ready(waiting)) == each
                waiting.remove(each)
            if waiting:
                with pytest.raises(TransferError, match=r"nothing came for 0 s \(refit\.timeout_s\) to relay"):
                    next(readiness.ready(waiting))
        assert not waiting
    readiness.fail("no more")
    assert list(readiness.ready(leaving)) == list(leaving)
    readiness.expect()
    readiness.fail("no more")
    with pytest.raises(TransferError, match="no more"):
        next(readiness.ready(leaving))


def test_what_does_not_come_is_not_passed_on():
    messages = messages_of(TWO_ENGINES)[0]
    with pytest.raises(ValueError, match="is relayed and does not come"):
        RelayReadiness(DestinationMessages({}, {}, messages.relays_out))


def test_a_comparison_names_what_differs_and_writes_nothing(set_up):
    stage = set_up(TWO_ENGINES)
    stage.connect()
    stage.refit(0)

    assert stage.compare(1) == [set()] * 4
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    stage.destinations[1].scramble(name)
    found = stage.compare(1)
    # The one that it passes some of this on to has not what it has.
    assert found == [set(), {name}, set(), {name}]
    assert stage.wrong(0) == [[], [name], [], []]


@pytest.mark.parametrize(
    ("topology", "node_once"),
    [
        # Everybody on one node, everybody alone, engines on a node of their own, an engine's worker without the
        # trainer, and the second workers of both beside a rank that has half of what they want.
        (Topology([0, 0], [0, 1], [0] * 4, range(2, 6)), False),
        (Topology.apart(2, 4), False),
        (Topology.separate(2, 4, gpus_per_node=4), True),
        (Topology([0, 0], [0, 1], [0, 0, 0, 1], range(2, 6)), False),
        (Topology([0, 1], [0, 1], [2, 0, 3, 0], [2, 3, 4, 5]), True),
    ],
)
def test_a_route_passes_on_where_it_makes_a_difference(topology, node_once):
    layout = TWO_ENGINES.plan.destination
    workers = zip(range(2), TWO_ENGINES.dtypes, strict=True)
    traces = [LoadTrace(layout.shard(worker), dtypes, [], {}) for worker, dtypes in workers]
    spec = TransferSpec(TWO_ENGINES.architecture, TWO_ENGINES.source, "local", traces, 2, topology, bucket_bytes=1400)
    assert spec.node_once == node_once
    parts = [spec.incoming(rank) for rank in range(4)]
    plain = replace(spec.plan, node_once=False)
    directly = [incoming(plain, rank, TWO_ENGINES.dtypes, 1400) for rank in range(4)]
    sent = [spec.outgoing(rank) for rank in range(2)]
    assert all(each.direct[source] == sent[source][rank] for rank, each in enumerate(parts) for source in each.direct)
    if node_once:
        assert any(each.relays_out for each in parts)
        messages = [
            message for each in parts for messages in vars(each).values() for message in numbered(messages).values()
        ]
        assert max(message.size_bytes for message in messages) <= 700
    else:
        assert parts == directly
        assert sent == [outgoing(plain, rank, TWO_ENGINES.dtypes, 1400) for rank in range(2)]
