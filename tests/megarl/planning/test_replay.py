"""The replay of a refit: cases computed by hand, and laws that hold for every traffic."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traffic import traffic_of

from converters.cost import Ports, Rates, busiest_port
from converters.topology import Topology
from megarl.planning.messages import RELAYS, Path
from megarl.planning.replay import RankRates, Replay, replay

SECOND = 10**9
RATES = Rates(nic_bytes_per_s_per_gpu=SECOND, nvlink_bytes_per_s_per_gpu=10 * SECOND)
"""A byte takes a nanosecond through a NIC."""
FREE = RankRates(np.inf, np.inf)
SLOW = RankRates(pack_bytes_per_s=4 * SECOND, unpack_bytes_per_s=2 * SECOND)


def seconds(topology: Topology, direct, relayed=None, *, memory=FREE, bucket_bytes=SECOND, buckets=2) -> float:
    traffic = traffic_of(topology, direct, relayed)
    return replay(traffic, RATES, memory, bucket_bytes=bucket_bytes, buckets=buckets).seconds


@pytest.mark.parametrize(
    ("memory", "buckets", "expected"),
    [
        (FREE, 2, 4.0),
        # 1/4 s to pack the first, 4 s to move all, 1/2 s to unpack the last.
        (SLOW, 2, 4.75),
        # With one bucket nothing overlaps.
        (SLOW, 1, 4 * (0.25 + 1 + 0.5)),
    ],
)
def test_packing_moving_and_unpacking_of_one_pair_overlap(memory, buckets, expected) -> None:
    assert seconds(Topology.apart(1, 1), [[4 * SECOND]], memory=memory, buckets=buckets) == expected


def test_the_slowest_stage_sets_the_pace() -> None:
    memory = RankRates(pack_bytes_per_s=SECOND / 3, unpack_bytes_per_s=np.inf)
    # Three seconds to pack each of four, one to move the last.
    assert seconds(Topology.apart(1, 1), [[4 * SECOND]], memory=memory) == 13.0


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (Topology.separate(1, 1, gpus_per_node=1), 1.0),
        (Topology([0], [0], [0], [1]), 0.1),
        (Topology.colocated(1, 1, gpus_per_node=1), 0.0),
    ],
)
def test_a_message_takes_the_port_between_its_ranks(topology: Topology, expected: float) -> None:
    assert seconds(topology, [[SECOND]]) == expected


def test_a_port_serves_one_message_at_a_time() -> None:
    assert seconds(Topology.apart(3, 1), [[SECOND]] * 3) == 3.0
    assert seconds(Topology.apart(1, 3), [[SECOND] * 3]) == 3.0


def test_ranks_of_one_gpu_share_its_port() -> None:
    assert seconds(Topology([0, 0], [0, 0], [1, 2], [1, 2]), [[SECOND, 0], [0, SECOND]]) == 2.0


@pytest.mark.parametrize(("sources", "destinations", "idle"), [(2, 2, 0), (8, 8, 0), (8, 4, 0), (5, 3, 0), (12, 8, 1)])
def test_a_full_exchange_keeps_every_port_busy(sources: int, destinations: int, idle: int) -> None:
    direct = [[SECOND] * destinations] * sources
    assert seconds(Topology.apart(sources, destinations), direct) == sources + idle


def test_large_and_small_messages_are_not_in_each_others_way() -> None:
    heavy = [[50 if source % 4 == destination % 4 else 1 for destination in range(8)] for source in range(16)]
    direct = np.array(heavy) * (SECOND // 100)
    assert seconds(Topology.apart(16, 8), direct) <= 1.01 * direct.sum(axis=0).max() / SECOND


def test_what_is_relayed_goes_on_while_the_rest_arrives() -> None:
    topology = Topology([0], [0], [1, 1], [1, 2])
    alone = seconds(topology, [[8 * SECOND, 0]], [[0, 4 * SECOND], [0, 0]], bucket_bytes=SECOND // 2)
    # The last of the parts departs when all bytes have arrived.
    assert alone == pytest.approx(8 + 0.4 / RELAYS)
    # No part of a message can go on before all of it is there.
    assert seconds(topology, [[0, SECOND]], [[0, 0], [SECOND, 0]]) == 1.1


def test_nothing_to_move_takes_no_time() -> None:
    assert seconds(Topology.apart(2, 2), [[0, 0], [0, 0]]) == 0.0


@st.composite
def refits(draw):
    sources, destinations = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    place = draw(st.sampled_from([Topology.separate, Topology.colocated]))
    topology = place(sources, destinations, gpus_per_node=draw(st.integers(1, 4)))
    sizes = st.one_of(st.just(0), st.integers(1, 40), st.integers(1, 1000))
    direct = [[draw(sizes) for _ in range(destinations)] for _ in range(sources)]
    node = topology.destination_node
    relayed = [
        [draw(sizes) if i != j and node[i] == node[j] else 0 for j in range(destinations)] for i in range(destinations)
    ]
    traffic = traffic_of(topology, direct, relayed)
    memory = draw(st.sampled_from([FREE, SLOW, RankRates(SECOND / 2, SECOND / 3)]))
    buckets = draw(st.integers(1, 3))
    played = replay(traffic, RATES, memory, bucket_bytes=draw(st.integers(30, 400)), buckets=buckets)
    return traffic, played, buckets


def intervals(keys, begin, end):
    found = defaultdict(list)
    for key, start, stop in zip(keys, begin, end, strict=True):
        found[int(key)].append((int(start), int(stop)))
    return {key: sorted(each) for key, each in found.items()}


def most_at_once(spans) -> int:
    events = sorted([(stop, -1) for _, stop in spans] + [(start, 1) for start, stop in spans if stop > start])
    at_once, most = 0, 0
    for _, step in events:
        at_once += step
        most = max(most, at_once)
    return most


@given(refits())
@settings(max_examples=200, deadline=None)
def test_no_rank_or_port_does_more_than_it_can(refit) -> None:
    traffic, played, buckets = refit
    sources = len(traffic.direct)
    is_direct = played.messages.sender < sources
    through_port = (played.routes.out_port % len(Path)) != Path.MEMORY
    for port in (played.routes.out_port, played.routes.in_port):
        for spans in intervals(
            port[through_port], *(t[through_port] for t in (played.departed, played.arrived))
        ).values():
            assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert np.all(played.packed <= played.departed)
    assert np.all(played.departed + played.routes.nanoseconds == played.arrived)
    assert np.all(played.arrived < played.unpacked + 1)
    # A bucket of a sender is taken from before the end of packing, one of a receiver from the departure.
    for key, begin in ((played.messages.sender, played.packed), (played.messages.receiver, played.departed)):
        for spans in intervals(key[is_direct], begin[is_direct], played.unpacked[is_direct]).values():
            assert most_at_once(spans) <= buckets


@given(refits())
@settings(max_examples=200, deadline=None)
def test_every_byte_arrives_and_never_before_the_busiest_port_allows(refit) -> None:
    traffic, played, _ = refit
    sources = len(traffic.direct)
    arrived = np.zeros((sources + len(traffic.relayed), len(traffic.relayed)), np.int64)
    np.add.at(arrived, (played.messages.sender, played.messages.receiver), played.messages.nbytes)
    assert np.array_equal(arrived[:sources], traffic.direct)
    assert np.array_equal(arrived[sources:], traffic.relayed)
    assert played.messages.nbytes.min(initial=1) > 0
    assert played.seconds >= busiest_port(traffic, RATES).seconds * (1 - 1e-12)
    out = np.zeros(len(Path) * traffic.topology.gpus, np.int64)
    np.add.at(out, played.routes.out_port, played.messages.nbytes)
    ports = Ports.of(traffic)
    assert np.array_equal(out[Path.NIC :: len(Path)], ports.nic_out)
    assert np.array_equal(out[Path.NVLINK :: len(Path)], ports.nvlink_out)


@given(refits())
@settings(max_examples=100, deadline=None)
def test_no_part_is_relayed_before_its_share_is_there(refit) -> None:
    traffic, played, _ = refit
    sources = len(traffic.direct)
    for i in np.flatnonzero(played.messages.sender >= sources):
        rank = played.messages.sender[i] - sources
        own = (played.messages.receiver == rank) & (played.messages.sender < sources)
        there = played.messages.nbytes[own & (played.unpacked <= played.departed[i])].sum()
        share = (played.messages.part[i] + 1) / played.messages.parts[i]
        assert there >= np.floor(traffic.direct[:, rank].sum() * share)


def test_the_same_refit_is_replayed_the_same() -> None:
    rng = np.random.default_rng(0)
    traffic = traffic_of(Topology.separate(6, 4, gpus_per_node=2), rng.integers(0, 100, (6, 4)))
    first, second = (replay(traffic, RATES, SLOW, bucket_bytes=30, buckets=2) for _ in range(2))
    assert isinstance(first, Replay)
    assert np.array_equal(first.unpacked, second.unpacked)
