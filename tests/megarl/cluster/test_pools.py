"""Pools: roles on machines of their own, whole or in part, and what a pool cannot have."""

import pytest

from converters.errors import UserError
from megarl.cluster.placement.placement import Node, Role, table
from megarl.cluster.placement.pools import place_in_pools
from megarl.schema import ClusterConfig, PoolConfig

NODES = [Node(f"id-{place}", f"10.0.0.{place}", cpus=64, gpus=gpus) for place, gpus in enumerate([0, 8, 8, 8])]


def roles(ranks=4, engines=2):
    trainer = Role("trainer", ranks, cpus=1, gpus=1, group=2)
    critic = Role("critic", 2, cpus=1, gpus=1)
    return [trainer, critic, Role("engine", engines, cpus=1, gpus=4)]


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ({}, ["10.0.0.1   engine 0-1", "10.0.0.2   trainer 0-3, critic 0-1"]),
        (
            {"training": PoolConfig(["critic", "trainer"], nodes=1)},
            ["10.0.0.1   trainer 0-3, critic 0-1", "10.0.0.2   engine 0-1"],
        ),
        # The first machine has no GPU; what is left of a part is for the others.
        (
            {"training": PoolConfig(["trainer"], nodes=2, gpus=2), "rollout": PoolConfig(["engine"], nodes=1)},
            ["10.0.0.1   engine 0-1", "10.0.0.2   trainer 0-1, critic 0-1", "10.0.0.3   trainer 2-3"],
        ),
        # Roles that take turns have the same GPUs.
        (
            {"all": PoolConfig(["trainer", "engine"], nodes=1, gpus=8, shared=True)},
            ["10.0.0.1   trainer 0-3 and engine 0-1 in turns", "10.0.0.2   critic 0-1"],
        ),
        (
            {"all": PoolConfig(["trainer", "engine"], nodes=2, gpus=4, shared=True)},
            ["10.0.0.1   trainer 0-3 and engine 0 in turns, critic 0-1", "10.0.0.2   engine 1"],
        ),
    ],
)
def test_roles_lie_where_their_pools_are(pools, says):
    placement = place_in_pools(roles(), NODES, pools)
    assert table(placement, ClusterConfig(pools=pools).sharing()) == says
    assert place_in_pools(roles(), NODES[::-1], pools) == placement
    assert list(placement) == ["trainer", "critic", "engine"]


def test_a_command_without_a_role_leaves_its_pool_alone():
    pools = {"rollout": PoolConfig(["engine"], nodes=9), "training": PoolConfig(["trainer"], nodes=1, gpus=2)}
    assert table(place_in_pools([Role("trainer", 2, cpus=1, gpus=1)], NODES, pools)) == ["10.0.0.1   trainer 0-1"]


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        (
            {"training": PoolConfig(["trainer"], nodes=2), "rollout": PoolConfig(["engine"], nodes=3)},
            "cluster.pools.rollout asks for 3 machines, and 2 that no other pool has are there: the cluster is 1"
            " machine of 64 CPUs, 3 machines of 8 GPUs and 64 CPUs. Lower cluster.pools.rollout.nodes",
        ),
        (
            {"training": PoolConfig(["trainer"], nodes=4, gpus=2)},
            "cluster.pools.training asks for 4 machines with 2 GPUs, and 3 that",
        ),
        (
            {"training": PoolConfig(["trainer"], nodes=1, gpus=3)},
            "cluster.pools.training: 4 trainer processes of 1 GPU need 4 GPUs; there are 3: 1 machine of 3 GPUs",
        ),
        (
            {"all": PoolConfig(["trainer", "engine"], nodes=1, gpus=7, shared=True)},
            "cluster.pools.all: 2 engine processes of 4 GPUs need 8 GPUs; there are 7: 1 machine of 7 GPUs",
        ),
        (
            {"training": PoolConfig(["trainer"], nodes=3)},
            "beside cluster.pools: 2 critic processes of 1 GPU and 2 engine processes of 4 GPUs need 10",
        ),
    ],
)
def test_a_pool_that_asks_for_more_than_there_is(pools, says):
    with pytest.raises(UserError) as caught:
        place_in_pools(roles(), NODES, pools)
    assert str(caught.value).startswith(says)


def test_those_that_take_turns_have_cores_of_their_own():
    pools = {"all": PoolConfig(["trainer", "engine"], nodes=1, gpus=4, shared=True)}
    asked = [Role("trainer", 4, cpus=5, gpus=1), Role("engine", 1, cpus=13, gpus=4)]
    with pytest.raises(UserError, match="1 engine process of 13 CPUs need 13 CPUs; there are 12"):
        place_in_pools(asked, NODES, pools)


def test_part_of_a_machine_has_part_of_its_cores():
    pools = {"training": PoolConfig(["trainer"], nodes=1, gpus=4)}
    asked = Role("trainer", 1, cpus=33, gpus=1)
    with pytest.raises(UserError, match="need 33 CPUs; there are 32"):
        place_in_pools([asked], NODES, pools)
