from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import coordinates, held, pairs, plans, topologies, whole_copies

from converters.boxes import Box
from converters.copying import copy_transfers
from converters.errors import UserError
from converters.layout import Layout, Placement, Shard
from converters.plan import Cutting, Plan, plan
from converters.topology import Topology


@given(pairs())
def test_every_element_of_the_destination_is_written_once_from_the_right_element(layouts):
    source, destination = layouts
    transfers = plan(source, destination)
    values = coordinates(source.hf_shapes)
    for rank in range(destination.ranks):
        shapes = destination.local_shapes(rank)
        written = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        times = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        mine = [transfer for transfer in transfers if transfer.destination_rank == rank]
        for transfer in mine:
            times[transfer.destination_name][transfer.destination_box.slices()] += 1
            copy_transfers([transfer], held(source, transfer.source_rank, values), written)
        expected = held(destination, rank, values)
        for name in shapes:
            assert torch.equal(written[name], expected[name])
            assert torch.equal(times[name], (expected[name] > 0).long())


@settings(max_examples=120)
@given(plans())
def test_replicas_get_every_element_once_from_a_source_or_a_neighbour(plan):
    values = coordinates(plan.source.hf_shapes)
    parts = [plan.destination_part(rank) for rank in range(plan.destination_ranks)]
    empty = [
        {n: torch.zeros(s, dtype=torch.int64) for n, s in plan.destination.local_shapes(rank).items()}
        for _ in range(plan.replicas)
        for rank in range(plan.destination.ranks)
    ]
    written, times = empty, [{n: t.clone() for n, t in tensors.items()} for tensors in empty]
    for stage in ("transfers", "relays_in"):
        for part in parts:
            for each in getattr(part, stage):
                of = held(plan.source, each.source_rank, values) if stage == "transfers" else written[each.source_rank]
                copy_transfers([each], of, written[each.destination_rank])
                times[each.destination_rank][each.destination_name][each.destination_box.slices()] += 1
    for rank in range(plan.destination_ranks):
        expected = held(plan.destination, rank % plan.destination.ranks, values)
        for name in expected:
            assert torch.equal(written[rank][name], expected[name])
            assert torch.equal(times[rank][name], (expected[name] > 0).long())


@settings(max_examples=120)
@given(plans())
def test_both_ends_find_the_same_transfers_in_the_same_order(plan):
    ranks, sources = range(plan.destination_ranks), range(plan.source.ranks)
    arriving = [plan.destination_part(rank) for rank in ranks]
    leaving = [plan.transfers_from(rank) for rank in sources]
    for source in sources:
        assert [each.destination_rank for each in leaving[source]] == sorted(
            e.destination_rank for e in leaving[source]
        )
        for rank in ranks:
            there = [each for each in arriving[rank].transfers if each.source_rank == source]
            assert there == [each for each in leaving[source] if each.destination_rank == rank]
    relays_in = Counter(each for part in arriving for each in part.relays_in)
    assert relays_in == Counter(each for part in arriving for each in part.relays_out)
    assert set(relays_in.values()) <= {1}


@settings(max_examples=120)
@given(plans())
def test_every_element_comes_from_one_of_its_nearest_holders(plan):
    place = plan.place

    def distance(source, rank):
        if place.source_gpu[source] == place.destination_gpu[rank]:
            return 0
        return 1 if place.source_node[source] == place.destination_node[rank] else 2

    owners = {}
    for source in range(plan.source.ranks):
        for placement in plan.source.placements(source):
            of_tensor = owners.setdefault(placement.hf_name, torch.zeros(64, *plan.source.hf_shapes[placement.hf_name]))
            of_tensor[(source, *placement.hf_box.slices())] = 1
    for rank in range(plan.destination_ranks):
        for each in plan.transfers_into(rank):
            values = coordinates({each.hf_name: plan.source.hf_shapes[each.hf_name]})
            tensors = held(plan.source, each.source_rank, {**coordinates(plan.source.hf_shapes), **values})
            for element in tensors[each.source_name][each.source_box.slices()].flatten():
                having = owners[each.hf_name].flatten(1)[:, element - 1].nonzero().flatten().tolist()
                assert distance(each.source_rank, rank) == min(distance(source, rank) for source in having)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.data())
def test_what_a_node_without_sources_wants_enters_it_once(source_ranks, workers, replicas, data):
    source, destination = whole_copies(source_ranks, 2, (7, 3)), whole_copies(workers, 2, (7, 3))
    topology = data.draw(topologies(source_ranks, workers * replicas))
    cutting = Cutting(data.draw(st.integers(1, 3)), smallest=1)
    plan = Plan(source, destination, replicas, topology, True, cutting)
    for node in set(topology.destination_node):
        entering = {name: torch.zeros(7, 3) for name in source.hf_shapes}
        ranks = [rank for rank, at in enumerate(topology.destination_node) if at == node]
        for rank in ranks:
            for each in plan.transfers_into(rank):
                entering[each.hf_name][each.destination_box.slices()] += 1
        times = len(ranks) if node in topology.source_node else 1
        assert all((tensor == times).all() for tensor in entering.values())


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_holders_send_the_same_where_pieces_can_be_cut(source_ranks, replicas, workers):
    rows = 2 * 2520  # can be cut into up to 10 equal parts
    source, destination = whole_copies(source_ranks, 1, (rows, 1)), whole_copies(workers, 1, (rows, 1))
    plan = Plan(source, destination, replicas, cutting=Cutting(grain=1, smallest=1))
    sent = [sum(t.source_box.size for t in plan.transfers_from(rank)) for rank in range(source_ranks)]
    assert sent == [rows * replicas * workers // source_ranks] * source_ranks


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 12))
def test_holders_send_at_most_a_part_per_destination_more_than_others_where_pieces_cannot_be_cut(
    source_ranks, replicas, workers, names
):
    source, destination = whole_copies(source_ranks, names, (1, 5)), whole_copies(workers, names, (1, 5))
    plan = Plan(source, destination, replicas)
    sent = [len(plan.transfers_from(rank)) for rank in range(source_ranks)]
    assert max(sent) <= replicas * workers * names / source_ranks + replicas * workers


def test_holders_share_the_sending_to_nodes_without_a_holder():
    """Source and replica 0 on node 0, replica 1 on node 1."""
    plan = Plan(
        whole_copies(4, 1, (256, 1)),
        whole_copies(1, 1, (256, 1)),
        replicas=2,
        topology=Topology([0] * 4, [0, 1, 2, 3], [0, 1], [4, 5]),
        cutting=Cutting(grain=1, smallest=1),
    )
    assert [each.source_box.size for each in plan.transfers_into(1)] == [64] * 4
    assert {each.source_rank for each in plan.transfers_into(1)} == {0, 1, 2, 3}


def test_a_cut_leaves_blocks_whole_and_makes_no_small_parts():
    cutting = Cutting(grain=128, smallest=1000)

    def rows(start, stop, columns, parts):
        return [(b.start[0], b.stop[0]) for b in cutting.cut(Box((start, 0), (stop, columns)), parts)]

    assert rows(0, 512, 10, 2) == [(0, 256), (256, 512)]
    assert rows(100, 600, 10, 2) == [(100, 256), (256, 600)]
    assert rows(0, 512, 10, 8) == [(0, 128), (128, 256), (256, 384), (384, 512)]
    assert rows(0, 512, 5, 8) == [(0, 256), (256, 512)]
    assert rows(10, 70, 1000, 8) == [(10, 70)]
    assert cutting.cut(Box((), ()), 4) == [Box((), ())]


def test_each_replica_asks_a_data_parallel_replica_of_its_own():
    plan = Plan(whole_copies(4, 5, (256, 256)), whole_copies(2, 5, (256, 256)), replicas=4)
    for replica in range(4):
        for worker in range(2):
            assert {each.source_rank for each in plan.transfers_into(2 * replica + worker)} == {replica}


@given(pairs())
def test_the_same_layouts_give_the_same_plan(layouts):
    assert plan(*layouts) == plan(*layouts)


def test_replicas_share_the_sending():
    transfers = plan(whole_copies(ranks=4, names=8), whole_copies(ranks=1, names=8))
    sent = [sum(t.source_box.size for t in transfers if t.source_rank == rank) for rank in range(4)]
    assert sent == [30, 30, 30, 30]


def test_an_element_that_no_source_holds_is_an_error():
    half = Placement("t0", Box((0, 0), (2, 5)), "t0", Box.whole((2, 5)))
    source = Layout(1, {"t0": (3, 5)}, lambda _: Shard({"t0": (2, 5)}, [half]))
    with pytest.raises(ValueError, match=r"no source rank holds .* of t0"):
        plan(source, whole_copies(1, 1))


def test_a_destination_with_a_gap_is_an_error():
    destination = Layout(1, {"t0": (3, 5)}, lambda _: Shard({"t0": (3, 5)}, []))
    with pytest.raises(ValueError, match="only 0 of the 15 elements of t0"):
        plan(whole_copies(1, 1), destination)


def test_a_topology_of_other_ranks_is_an_error():
    for topology, message in (
        (Topology.apart(3, 2), "a place for 3 source ranks, but there are 2"),
        (Topology.apart(2, 1), "a place for 1 destination ranks, but there are 2"),
    ):
        with pytest.raises(UserError, match=message):
            Plan(whole_copies(2, 1), whole_copies(1, 1), 2, topology)
    with pytest.raises(UserError, match="1 source ranks a node and 2 a GPU"):
        Topology([0], [0, 1], [], [])
    with pytest.raises(UserError, match="destination rank 0 on GPU 3 of node 1, but GPU 3 on node 0"):
        Topology([0], [3], [1], [3])


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        (1, 2, "the destination has t1, one of 1 tensors that the source does not have"),
        (3, 1, "the source has t1, one of 2 tensors that the destination does not have"),
    ],
)
def test_layouts_of_different_sizes_are_an_error(source, destination, message):
    with pytest.raises(UserError, match=message):
        Plan(whole_copies(1, source), whole_copies(1, destination))


def test_layouts_of_different_models_are_an_error():
    other = Layout(1, {"t0": (5, 3)}, lambda _: Shard({}, []))
    with pytest.raises(UserError, match="t0 has shape"):
        plan(other, whole_copies(1, 1))
