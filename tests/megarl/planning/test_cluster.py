"""Clusters: rates in bytes per second, ranks on nodes, and what does not fit."""

import pytest

from converters.errors import UserError
from megarl.planning.cluster import Cluster, Cores


def test_rates_are_of_one_gpu_in_bytes_per_second() -> None:
    cluster = Cluster(nic_gbit_per_s=400, nvlink_gbyte_per_s=450, memory_gbyte_per_s=3350)
    assert (cluster.rates.nic_bytes_per_s_per_gpu, cluster.rates.nvlink_bytes_per_s_per_gpu) == (50e9, 450e9)
    assert cluster.memory_bytes_per_s == 3.35e12


def test_engines_begin_on_a_node_of_their_own_or_lie_on_the_trainer() -> None:
    cluster = Cluster(gpus_per_node=4, nodes=4)
    apart = cluster.topology(6, 8, colocated=False)
    assert list(apart.source_node) == [0, 0, 0, 0, 1, 1]
    assert list(apart.destination_gpu) == list(range(8, 16))
    assert list(apart.destination_node) == [2] * 4 + [3] * 4
    together = cluster.topology(6, 4, colocated=True)
    assert list(together.destination_gpu) == [0, 1, 2, 3]
    assert set(together.destination_node) == {0}


def test_ranks_that_share_cores_fill_one_node_after_the_other() -> None:
    cores = Cores(per_node=2, pack_gbyte_per_s=8, unpack_gbyte_per_s=8)
    topology = Cluster(gpus_per_node=4, cores=cores).topology(6, 3, colocated=False)
    assert list(topology.source_node) == [0, 0, 0, 0, 1, 1]
    assert list(topology.destination_gpu) == [6, 7, 8]
    assert list(topology.destination_node) == [1, 1, 2]


@pytest.mark.parametrize(
    ("sources", "destinations", "colocated", "says"),
    [
        (6, 9, False, r"6 ranks of the trainer and 9 of the engines take 5 nodes of 4 GPUs, and the cluster has 4"),
        (17, 1, True, r"17 ranks of the trainer and 1 of the engines take 5 nodes"),
        (4, 8, True, r"the engines' 8 ranks do not fit on the trainer's 4 GPUs"),
    ],
)
def test_a_cluster_that_does_not_hold_the_ranks_is_refused(sources, destinations, colocated, says) -> None:
    with pytest.raises(UserError, match=says):
        Cluster(gpus_per_node=4, nodes=4).topology(sources, destinations, colocated=colocated)


@pytest.mark.parametrize(
    "field", ["gpus_per_node", "nic_gbit_per_s", "nvlink_gbyte_per_s", "memory_gbyte_per_s", "nodes"]
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_rate_or_size_that_is_nothing_is_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"the cluster's {field} is {value}; it must be more than 0"):
        Cluster(**{field: value})


@pytest.mark.parametrize("field", ["per_node", "pack_gbyte_per_s", "unpack_gbyte_per_s"])
def test_cores_that_do_nothing_are_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"the cores' {field} is 0; it must be more than 0"):
        Cores(**{"per_node": 2, "pack_gbyte_per_s": 8.0, "unpack_gbyte_per_s": 8.0, field: 0})


@pytest.mark.parametrize("field", ["nic_gbit_per_s", "nvlink_gbyte_per_s", "memory_gbyte_per_s"])
def test_a_rate_at_which_nothing_would_end_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"the cluster's {field} is 1e-300; it must be at least 0.001"):
        Cluster(**{field: 1e-300})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("pack_gbyte_per_s", 1e-300, "it must be at least 0.001"),
        ("unpack_gbyte_per_s", 1e-300, "it must be at least 0.001"),
        ("message_us", float("inf"), "it must be at most 1e.06, a second"),
    ],
)
def test_cores_that_would_never_end_are_refused(field: str, value: float, says: str) -> None:
    with pytest.raises(UserError, match=f"the cores' {field} is {value}; {says}"):
        Cores(**{"per_node": 2, "pack_gbyte_per_s": 8.0, "unpack_gbyte_per_s": 8.0, field: value})


def test_a_node_larger_than_memory_is_refused() -> None:
    with pytest.raises(UserError, match="the cluster's gpus_per_node is 1000000000000; it must be at most 65,536"):
        Cluster(gpus_per_node=10**12)
