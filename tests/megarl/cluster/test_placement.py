"""Placement: every process on a machine that has room, groups whole where they can be, and a sentence where not."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from megarl.cluster.placement.placement import Node, Role, find_place, place, table


def machines(*gpus, cpus=64.0):
    return [Node(f"id-{place}", f"10.0.0.{place + 8}", cpus, each) for place, each in enumerate(gpus)]


def trainer(ranks, group=1, name="trainer"):
    return Role(name, ranks, cpus=1, gpus=1, group=group)


def engines(processes, gpus, nodes=1):
    return Role("engine", processes, cpus=1, gpus=gpus, group=nodes, apart=nodes > 1)


POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def runs(draw):
    """Roles of any sizes, the last perhaps over machines."""
    group = draw(st.integers(1, 6))
    roles = [trainer(group * draw(st.integers(1, 4)), group)]
    if draw(st.booleans()):
        roles.append(trainer(draw(st.integers(1, 4)), name="critic"))
    nodes = draw(st.integers(1, 3))
    return [*roles, engines(nodes * draw(st.integers(1, 3)), draw(st.integers(0, 8)), nodes)]


clusters = st.lists(st.tuples(st.integers(0, 16), st.integers(0, 8)), min_size=1, max_size=6).map(
    lambda sizes: [
        replace(machines(gpus)[0], id=f"{n}", address=f"10.0.0.{n}", cpus=cpus) for n, (cpus, gpus) in enumerate(sizes)
    ]
)


@given(runs(), clusters, st.randoms(use_true_random=False))
def test_no_machine_is_over_its_resources_and_the_order_of_machines_changes_nothing(roles, nodes, shuffler):
    placement = find_place(roles, nodes)
    shuffled = random.Random(shuffler.random()).sample(nodes, len(nodes))
    assert find_place(roles, shuffled) == placement
    if placement is None:
        with pytest.raises(UserError, match="machine"):
            place(roles, nodes)
        return
    used = defaultdict(lambda: [0, 0])
    for role in roles:
        assert len(placement[role.name]) == role.processes
        for node in placement[role.name]:
            used[node][0] += role.cpus
            used[node][1] += role.gpus
    assert all(cpus <= node.cpus and gpus <= node.gpus for node, (cpus, gpus) in used.items())
    assert all(len(set(group)) == len(group) for group in groups(roles[-1], placement) if roles[-1].apart)


def groups(role, placement):
    places = placement[role.name]
    return [places[start : start + role.group] for start in range(0, role.processes, role.group)]


@given(st.integers(1, 8), st.integers(1, 6), st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_as_many_groups_are_whole_as_machines_have_room_for(group, count, gpus):
    role = trainer(group * count, group)
    placement = find_place([role], machines(*gpus))
    assert (placement is None) == (role.processes > sum(gpus))
    if placement is not None:
        whole = sum(len(set(each)) == 1 for each in groups(role, placement))
        room = sum(each // group for each in gpus)
        assert whole == min(count, room) if max(gpus) >= group else whole == 0


@given(st.lists(st.tuples(POWERS, st.integers(1, 4)), min_size=1, max_size=4), st.integers(1, 8))
def test_sizes_that_divide_each_other_always_fit_whole(sizes, count):
    """However roles of 1, 2, 4 and 8 GPUs are mixed: they need as many machines of 8 as they have GPUs."""
    roles = [trainer(size * many, size, f"model_{index}") for index, (size, many) in enumerate(sizes)]
    roles.append(engines(count, 4))
    needed = -(-sum(role.processes * int(role.gpus) for role in roles) // 8)
    assert find_place(roles, machines(*[8] * (needed - 1))) is None
    placement = place(roles, machines(*[8] * needed))
    assert all(len(set(each)) == 1 for role in roles for each in groups(role, placement))
    for role in roles:
        addresses = [int(node.address.split(".")[-1]) for node in placement[role.name]]
        assert addresses == sorted(addresses)


def test_a_group_larger_than_a_machine_takes_machines_that_are_whole():
    placement = place([engines(2, 2), trainer(16, 16)], machines(8, 8, 8))
    assert [node.address for node in placement["trainer"]] == ["10.0.0.8"] * 8 + ["10.0.0.9"] * 8
    assert {node.address for node in placement["engine"]} == {"10.0.0.10"}


def test_the_parts_of_an_engine_are_on_machines_of_their_own_also_where_that_takes_care():
    placement = place([engines(6, 4, nodes=2)], machines(8, 8, 8))
    assert [len(set(each)) for each in groups(engines(6, 4, nodes=2), placement)] == [2, 2, 2]


def test_sizes_that_fit_in_another_order_than_the_largest_first_are_found():
    placement = place([trainer(3, 3), engines(3, 2)], machines(4, 5))
    assert {node.gpus for node in placement["trainer"]} == {5}


def test_shares_of_a_gpu_add_up():
    role = Role("engine", 3, cpus=1, gpus=0.3)
    assert find_place([role], machines(3 * 0.3)) is not None
    assert find_place([replace(role, processes=4)], machines(3 * 0.3)) is None


def test_the_table_has_a_line_for_each_machine():
    placement = place([trainer(12, 4), engines(2, 8, nodes=2), trainer(2, name="critic")], machines(8, 8, 8, 8))
    assert table(placement) == [
        "10.0.0.8    engine 0",
        "10.0.0.9    engine 1",
        "10.0.0.10   trainer 0-7",
        "10.0.0.11   trainer 8-11, critic 0-1",
    ]
    # A group that found no machine with room for all of it.
    assert table(place([trainer(6, 3)], machines(5, 1))) == ["10.0.0.8   trainer 0-4", "10.0.0.9   trainer 5"]


@pytest.mark.parametrize(
    ("roles", "nodes", "says"),
    [
        (
            [trainer(8, 4), engines(4, 2)],
            machines(8, 4),
            "8 trainer processes of 1 GPU and 4 engine processes of 2 GPUs need 16 GPUs; there are 12: 1 machine of 4"
            " GPUs, 1 machine of 8 GPUs. Take fewer or smaller ones, or more machines",
        ),
        ([trainer(4)], machines(8, cpus=3), "need 4 CPUs; there are 3: 1 machine of 3 CPUs."),
        (
            [engines(3, 4, nodes=3)],
            machines(8, 8),
            "an engine over 3 machines needs 4 GPUs and 1 CPU on each; of 2 machines of 8 GPUs and 64 CPUs 2 have as",
        ),
        ([engines(1, 16)], machines(8, 8), "a process of engine needs 16 GPUs and 1 CPU of one machine, and there are"),
        ([engines(2, 6)], machines(8, 4), "2 engine processes of 6 GPUs and 1 CPU do not fit beside each other on"),
        # On this machine alone nothing is said of CPUs.
        (
            [replace(trainer(2), cpus=0.0001)],
            machines(1),
            "2 trainer processes of 1 GPU need 2 GPUs; there are 1: 1 ma",
        ),
        ([trainer(1)], [], "need 1 GPUs; there are 0: none"),
    ],
)
def test_what_cannot_fit_is_said_with_the_arithmetic(roles, nodes, says):
    with pytest.raises(UserError) as caught:
        place(roles, nodes)
    assert says in str(caught.value)
