"""SenderChoice and receivers in processes of their own: what arrives, and what is said when it cannot."""

import secrets
from dataclasses import replace

import pytest
import torch
from small_configs import make_config
from transfer_scenes import STEP, Scene
from transfer_stages import failures

from converters.layouts.parallel_sizes import ParallelSizes
from converters.topology import Topology
from megarl.resharding.direct.messages_by_peer import incoming, outgoing

EVERY_CUT = ParallelSizes(
    world_size=4,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
)
MOE = Scene(make_config("qwen3_moe"), EVERY_CUT)
SMALL = Scene(make_config("qwen3"), ParallelSizes(world_size=2, tensor_model_parallel_size=2))
# A source and a worker of the engine on each; both sources have something for both workers.
TWO_MACHINES = Scene(
    make_config("qwen3"),
    ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    topology=Topology.colocated(2, 2, gpus_per_node=1),
)
SCENES = {
    "qwen3_moe": MOE,
    "on two machines, over gloo": replace(TWO_MACHINES, transport="tcp"),
    "on two machines, by one-sided reads": replace(TWO_MACHINES, transport="rdma"),
    "on two machines with GPUs, by one-sided reads": replace(TWO_MACHINES, transport="rdma", played_cuda=True),
    "through memory of GPUs": replace(MOE, transport="cuda_ipc", played_cuda=True),
    "over gloo": replace(MOE, transport="tcp"),
    "by one-sided reads": replace(MOE, transport="rdma"),
    # Each replica of the trainer's weights serves a replica of the engine; nothing is converted.
    "replicas": replace(
        SMALL, source=ParallelSizes(world_size=4, tensor_model_parallel_size=2), replicas=2, source_dtype=torch.bfloat16
    ),
    # A vocabulary that the engine's workers share out with padding.
    "deepseek_v3": Scene(
        make_config("deepseek_v3", num_nextn_predict_layers=0, vocab_size=17),
        ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
    ),
    "more senders than receivers": replace(SMALL, source=ParallelSizes(world_size=4), workers=1),
}


@pytest.mark.parametrize("name", SCENES)
def test_every_refit_brings_the_weights_of_its_version(set_up, name):
    scene = SCENES[name]
    stage = set_up(scene)
    stage.connect()
    for version in (0, 1, 2):
        stage.bytes_of_refit(version)
        assert any(stage.wrong(version + 1))


@pytest.mark.parametrize("name", SCENES)
def test_changes_bring_the_weights_of_every_version(set_up, name):
    stage = set_up(SCENES[name])
    stage.connect(with_changes=True)
    whole = stage.bytes_of_refit(2)
    # Few changes, others, all, and few again.
    for version, share in ((2 + STEP, 0.4), (2 + 2 * STEP, 0.4), (1, 1), (1 + STEP, 0.4)):
        assert stage.bytes_of_refit(version) <= share * whole


@pytest.mark.parametrize("way", ["tcp", "rdma"])
def test_ranks_of_one_machine_go_through_memory_whatever_the_others_use(set_up, way):
    stage = set_up(replace(TWO_MACHINES, transport=way))
    stage.connect()
    outside = f"{way.capitalize()}RecvEndpoint"
    assert stage.call(stage.destinations, "sources_by_way") == [
        {"MappedRecvEndpoint": [0], outside: [1]},
        {"MappedRecvEndpoint": [1], outside: [0]},
    ]
    stage.bytes_of_refit(1)
    stage.call(stage.destinations, "disconnect")
    assert stage.call([*stage.sources, *stage.destinations], "close") == [0] * 4


@pytest.mark.parametrize("name", SCENES)
def test_no_byte_moves_that_is_not_needed(name):
    scene = SCENES[name]
    plan, dtypes = scene.plan, scene.dtypes
    sent = [outgoing(plan, rank, dtypes, scene.bucket_bytes) for rank in range(scene.source.world_size)]
    got = [incoming(plan, rank, dtypes, scene.bucket_bytes).direct for rank in range(plan.destination_ranks)]
    pairs = {
        (source, destination): messages
        for source, messages in enumerate(sent)
        for destination, messages in messages.items()
    }
    assert pairs == {
        (source, destination): messages
        for destination, messages in enumerate(got)
        for source, messages in messages.items()
    }
    bytes_sent = sum(
        piece.size_bytes for messages in pairs.values() for message in messages for piece in message.pieces
    )
    shards = [plan.destination.shard(worker) for worker in range(scene.workers)]
    needed = sum(placement.local_box.size for shard in shards for placement in shard.placements)
    assert bytes_sent == scene.replicas * needed * scene.dtype.itemsize


def test_a_comparison_names_what_differs_and_writes_nothing(set_up):
    stage = set_up(SMALL)
    stage.connect()
    stage.refit(0)

    assert stage.compare(1) == [set(), set()]
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    stage.destinations[1].scramble(name)
    assert stage.compare(1) == [set(), {name}]
    assert stage.wrong(0) == [[], [name]]


def test_a_peer_without_the_key_is_turned_away(set_up):
    scene = replace(SMALL, timeout_s=1.5)
    stage = set_up(scene)
    rendezvous = stage.rendezvous()
    wrong = replace(rendezvous, key=secrets.token_bytes(16))
    calls = stage.begin(stage.sources, "connect", rendezvous) + stage.begin(stage.destinations, "connect", wrong)
    found = failures(calls)
    assert all(
        "TransferError: no peer came to" in error and "within 1.5 s (refit.timeout_s)" in error for error in found[:2]
    )
    assert all("does not answer at" in error for error in found[2:])


def test_ranks_with_different_plans_do_not_begin(set_up):
    stage, other = set_up(SMALL), set_up(replace(SMALL, bucket_bytes=500))
    rendezvous = stage.rendezvous()
    other.call(other.destinations, "open")
    calls = stage.begin(stage.sources, "connect", rendezvous) + stage.begin(other.destinations, "connect", rendezvous)
    found = failures(calls)
    assert all("TransferError" in error for error in found)
    assert any("do not have the same plan" in error for error in found)


def test_a_version_that_nobody_asked_for_is_refused(set_up):
    stage = set_up(SMALL)
    stage.connect()
    calls = stage.begin(stage.sources, "send", 3) + stage.begin(stage.destinations, "receive", 4)
    assert any("of version 3, and version 4 lacks its messages [0, 1, 2]" in error for error in failures(calls))
    assert all("TransferError" in error for error in failures(calls))
