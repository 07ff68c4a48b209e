"""A rank that ends, stops, fails or sends something else at any point of a refit: all others hear of it at once."""

import os
import signal
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import replace

import pytest
from small_configs import make_config
from transfer_scenes import Scene
from transfer_stages import NO_END, failures

from converters.layouts.parallel_sizes import ParallelSizes
from converters.topology import Topology
from megarl.resharding.direct.abort import abort_rendezvous
from megarl.resharding.direct.zero_copy import SMALLEST_BYTES

# Each source has messages for each destination: nobody is done before all are.
SCENE = Scene(make_config("qwen3"), ParallelSizes(world_size=2))
MOVING = {"sources": ("packed", "announced"), "destinations": ("unpacked", "acknowledged")}
TRANSFER = [(side, point, count) for side, points in MOVING.items() for point in points for count in (1, 3)]
# The sentence when the time is over after which a silent peer is given up: those that hear of a death never say it.
GIVEN_UP = ("refit.timeout_s", "temporarily unavailable", "imed out")
NEWS = (" is gone", "does not answer", "receiving from rank 0 failed", "reading from trainer rank 0 failed")
WAYS = {
    "shared_memory": SCENE,
    "cuda_ipc": replace(SCENE, transport="cuda_ipc", played_cuda=True),
    "tcp": replace(SCENE, transport="tcp"),
    "rdma": replace(SCENE, transport="rdma"),
    # Reads take time here, and the help of NIXL's thread in the process of the source.
    "rdma by way of sockets": replace(SCENE, transport="rdma", ucx_tls="tcp,self"),
    # A source and a worker on each, which go through memory.
    "rdma between two machines with GPUs": replace(
        SCENE,
        source=ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
        transport="rdma",
        topology=Topology.colocated(2, 2, gpus_per_node=1),
        played_cuda=True,
    ),
    "rdma between two machines": replace(
        SCENE,
        source=ParallelSizes(world_size=2, pipeline_model_parallel_size=2),
        transport="rdma",
        topology=Topology.colocated(2, 2, gpus_per_node=1),
    ),
}

POINTS_OF_MEETING = (
    ("sources", "joined"),
    ("sources", "accept"),
    ("destinations", "connected"),
    ("destinations", "taken up"),
)
# By shared memory at all points, and by the others at the first.
MEETING = [
    pytest.param(way, *point, marks=[pytest.mark.long] * (way != "shared_memory" and number > 0))
    for way in WAYS
    for number, point in enumerate(POINTS_OF_MEETING)
]
EVERY_WAY = [pytest.param(way, marks=[pytest.mark.long] * ("GPUs" in way)) for way in WAYS]


@pytest.mark.parametrize(("way", "side", "point"), MEETING)
def test_a_death_while_the_ranks_meet(set_up, way, side, point):
    stage = set_up(WAYS[way])
    victim = getattr(stage, side)[1]
    victim.break_at(point, 1, "kill")
    rendezvous = stage.rendezvous()
    calls = stage.begin_connect(rendezvous)
    if rendezvous.store is not None:
        # Ranks that wait at the store see no end of a peer: whoever let them meet does.
        wait(calls, return_when=FIRST_EXCEPTION)
        abort_rendezvous(rendezvous, "a rank is gone")
    check_that_all_hear_of_it(stage, calls, victim)


@pytest.mark.parametrize(("way", "side", "point"), MEETING)
def test_a_rank_that_stands_still_while_the_ranks_meet_is_given_up(set_up, way, side, point):
    stage = set_up(replace(WAYS[way], timeout_s=1.5))
    victim = getattr(stage, side)[1]
    victim.break_at(point, 1, "stop")
    check_that_it_is_given_up(stage, stage.begin_connect(), victim)


@pytest.mark.long
def test_a_store_that_stands_still_is_given_up(set_up):
    stage = set_up(replace(WAYS["tcp"], timeout_s=1.5))
    # It has the store, too.
    victim = stage.sources[0]
    victim.break_at("accept", 1, "stop")
    rendezvous = stage.rendezvous()
    check_that_it_is_given_up(stage, stage.begin_connect(rendezvous), victim)
    # Whoever calls the meeting off does not wait for it either.
    abort_rendezvous(rendezvous, "a rank stands still")


def test_a_death_is_heard_of_beside_a_silent_peer(set_up):
    stage = set_up(SCENE)
    victim = stage.sources[1]
    victim.break_at("accept", 1, "kill")
    # The other source says nothing to the one worker, since it waits for the other worker, which does not come.
    found = failures(stage.begin([*stage.sources, stage.destinations[0]], "connect", stage.rendezvous()))
    assert found[2] == "TransferError: trainer rank 1 is gone"
    assert found[0] == "TransferError: engine worker 0 failed: trainer rank 1 is gone"


@pytest.mark.parametrize("way", ["shared_memory", "cuda_ipc", "tcp", "rdma"])
def test_a_death_before_the_ranks_meet_is_told_to_all_that_wait(set_up, way):
    stage = set_up(WAYS[way])
    rendezvous = stage.rendezvous()
    stage.destinations[1].close()
    others = [*stage.sources, stage.destinations[0]]
    waiting = stage.begin(others, "connect", rendezvous)
    assert failures(waiting[:1], timeout_s=0.5) == [NO_END]
    abort_rendezvous(rendezvous, "engine 1 died")
    found = failures(waiting)
    assert [error.partition(":")[0] for error in found] == ["TransferError"] * 3
    assert not [error for error in found if any(said in error for said in GIVEN_UP)]
    assert any("engine 1 died" in error for error in found)
    assert [rank.close() for rank in others] == [0] * 3


@pytest.mark.parametrize(("side", "point", "count"), TRANSFER)
def test_a_death_while_the_weights_move(set_up, side, point, count):
    stage = set_up(SCENE)
    stage.connect()
    stage.refit(1)
    victim = getattr(stage, side)[0]
    victim.break_at(point, count, "kill")
    check_that_all_hear_of_it(stage, stage.begin_refit(2), victim)


@pytest.mark.parametrize(("side", "point"), [("sources", "announced"), ("destinations", "unpacked")])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "shared_memory"])
def test_a_death_while_the_weights_move_by_any_way(set_up, way, side, point):
    stage = set_up(WAYS[way])
    stage.connect()
    victim = getattr(stage, side)[0]
    victim.break_at(point, 3, "kill")
    check_that_all_hear_of_it(stage, stage.begin_refit(1), victim)


def check_that_all_hear_of_it(stage, calls, victim):
    """All that still need the victim, which are at least those of the other side, say that it is gone."""
    found = failures(calls)
    assert not [error for error in found if any(said in error for said in GIVEN_UP)]
    ranks = [*stage.sources, *stage.destinations]
    error_of = dict(zip(ranks, found, strict=True))
    died = error_of.pop(victim)
    assert "TransferError" not in died
    for rank in stage.destinations if victim in stage.sources else stage.sources:
        assert error_of[rank].startswith("TransferError: ")
    assert {error.partition(":")[0] for error in error_of.values()} <= {"TransferError", ""}
    assert any(news in error for error in found for news in NEWS)
    assert [rank.close() for rank in error_of] == [0] * 3


@pytest.mark.parametrize(("side", "point"), [("sources", "announced"), ("destinations", "unpacked")])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_stands_still_is_given_up(set_up, way, side, point):
    stage = set_up(replace(WAYS[way], timeout_s=1.5))
    stage.connect_in_time()
    victim = getattr(stage, side)[0]
    victim.break_at(point, 3, "stop")
    found = check_that_it_is_given_up(stage, stage.begin_refit(1), victim)
    if (way, side) == ("rdma by way of sockets", "sources"):
        # The second where NIXL's thread had answered the read before it stopped.
        seconds = f"{stage.scene.timeout_s:g} s"
        says = (
            f"trainer rank 0 let nothing be read for {seconds}",
            f"nothing came for {seconds} (refit.timeout_s) from trainer rank 0",
            # The other source may give up first.
            f"nothing came for {seconds} (refit.timeout_s) from engine worker",
        )
        assert any(each in error for error in found for each in says)


def check_that_it_is_given_up(stage, calls, victim):
    """All that still need the victim, which are at least those of the other side, end; the errors of the others."""
    call_of = dict(zip([*stage.sources, *stage.destinations], calls, strict=True))
    del call_of[victim]
    found = dict(zip(call_of, failures(call_of.values()), strict=True))
    for rank in stage.destinations if victim in stage.sources else stage.sources:
        assert found[rank].startswith("TransferError: ")
    assert any("refit.timeout_s" in error for error in found.values())
    assert [rank.close() for rank in call_of] == [0] * 3
    return list(found.values())


def test_a_source_that_stood_still_before_it_was_read_is_named(set_up):
    # One of each, so that nobody else gives it up before.
    alone = replace(SCENE, source=ParallelSizes(world_size=1), workers=1, transport="rdma", ucx_tls="tcp,self")
    stage = set_up(replace(alone, timeout_s=1.5))
    stage.connect_in_time()
    (source,), (destination,) = stage.sources, stage.destinations
    destination.read_when_still(source.pid())
    source.break_at("announced", 1, "stop")
    found = failures(stage.begin_refit(1)[1:])
    seconds = f"{stage.scene.timeout_s:g} s"
    assert found == [f"TransferError: trainer rank 0 let nothing be read for {seconds} (refit.timeout_s)"]
    assert destination.close() == 0


def test_a_source_that_dies_while_a_piece_is_read_past_the_buckets_is_heard_of(set_up):
    # Its matrix of embeddings has twice the bytes that a piece has to have for that.
    large = make_config("qwen3", vocab_size=SMALLEST_BYTES // SCENE.config["hidden_size"])
    scene = Scene(large, ParallelSizes(world_size=1), workers=1, bucket_bytes=2**21, transport="rdma")
    stage = set_up(replace(scene, ucx_tls="tcp,self", source_dtype=scene.dtype, timeout_s=300.0))
    stage.connect()
    (source,), (destination,) = stage.sources, stage.destinations
    assert destination.zero_copy_pieces() > 0
    pid = source.pid()
    destination.read_when_still(pid)
    source.break_at("announced", 1, "stop")
    receiving = stage.begin_refit(1)[1:]
    # It reads from memory of a process that stands still.
    assert failures(receiving, timeout_s=1.0) == [NO_END]
    os.kill(pid, signal.SIGKILL)
    (found,) = failures(receiving)
    assert any(news in found for news in NEWS)
    assert destination.close() == 0


@pytest.mark.parametrize("told_by", ["another source", "its own process"])
def test_a_worker_that_reads_from_a_rank_that_stands_still_hears_of_a_failure(set_up, told_by):
    # So long that nobody is given up within the test.
    stage = set_up(replace(WAYS["rdma by way of sockets"], workers=1, timeout_s=300.0))
    stage.connect()
    (still, other), (destination,) = stage.sources, stage.destinations
    destination.read_when_still(still.pid())
    still.break_at("announced", 1, "stop")
    if told_by == "another source":
        other.break_at("packed", 1, "fail late")
    receiving = stage.begin_refit(1)[2:]
    if told_by == "its own process":
        assert failures(receiving, timeout_s=1.0) == [NO_END]
        destination.abort("the engine ends")
    said = {"another source": "trainer rank 1 failed: on purpose", "its own process": "the engine ends"}
    assert failures(receiving) == [f"TransferError: {said[told_by]}"]
    assert destination.close() == 0


@pytest.mark.parametrize("side", ["sources", "destinations"])
@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_rank_that_is_slow_is_waited_for(set_up, way, side):
    stage = set_up(WAYS[way])
    stage.connect()
    victim = getattr(stage, side)[0]
    victim.break_at("packed" if side == "sources" else "unpacked", 2, "linger")
    stage.refit(1)
    assert stage.wrong(0) == [[], []]


@pytest.mark.parametrize("way", ["shared_memory", "cuda_ipc", "tcp", "rdma", "rdma between two machines"])
def test_an_engine_that_was_started_again_meets_the_ranks(set_up, way):
    stage = set_up(WAYS[way])
    stage.connect()
    stage.destinations[1].break_at("unpacked", 2, "kill")
    assert all(failures(stage.begin_refit(1))[3:])
    stage.replace_destination(1)
    stage.connect()
    stage.refit(1)
    assert stage.wrong(0) == [[], []]


@pytest.mark.parametrize("way", ["shared_memory", "cuda_ipc", "tcp", "rdma"])
@pytest.mark.parametrize(("side", "point", "count"), [("sources", "packed", 2), ("destinations", "unpacked", 2)])
def test_after_an_error_the_same_ranks_meet_again(set_up, way, side, point, count):
    stage = set_up(WAYS[way])
    stage.connect()
    getattr(stage, side)[0].break_at(point, count, "fail")
    found = failures(stage.begin_refit(1))
    assert sum("RuntimeError: on purpose" in error for error in found) == 1
    assert sum("failed: on purpose" in error for error in found) >= 1
    # A rank of its own side may be done with its part before it hears of it.
    assert all(found[2:] if side == "sources" else found[:2])
    assert stage.call([*stage.sources, *stage.destinations], "close") == [0] * 4
    stage.connect()
    stage.refit(1)
    assert stage.wrong(0) == [[], []]


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_changed_bit_is_found_by_the_checksum_alone(set_up, way):
    stage = set_up(WAYS[way])
    stage.connect()
    stage.sources[1].break_at("packed", 4, "corrupt")
    found = failures(stage.begin_refit(1))
    assert any("of trainer rank 1 came with checksum" in error for error in found[2:])
    assert any("came with checksum" in error for error in found[:2])
    stage.call([*stage.sources, *stage.destinations], "close")
    stage.connect(with_checksum=False)
    stage.sources[1].break_at("packed", 4, "corrupt")
    stage.refit(2)
    assert sum(map(len, stage.wrong(0))) == 1
