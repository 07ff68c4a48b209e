"""Machines without a port for RDMA, or whose ports reach no GPU, are named, on either side, with what to do."""

from types import SimpleNamespace

import pytest

from megarl.process.gpudirect import GPUDIRECT
from megarl.refit.rdma_restrictions import Rdma, look_at_rdma, without_gpudirect, without_ports


def test_where_all_have_a_port_nothing_is_said():
    assert without_ports([True, True], [True]) == ""


def test_ranks_and_workers_without_a_port_are_named():
    assert without_ports([True, True], [False, True]) == (
        ", but by way of sockets: no active port of InfiniBand, RoCE or EFA is seen by engine worker 0 (ibstat,"
        " /dev/infiniband). If the machines have ports, bring them up and show them to the containers; else"
        " refit.delta=true lets changes alone travel"
    )
    found = without_ports([False] * 3, [True] + [False] * 5)
    assert " by trainer rank 0, trainer rank 1, trainer rank 2, engine worker 1 and 4 others (" in found


def test_where_no_obstacle_is_known_between_cards_and_gpus_nothing_is_said():
    assert without_gpudirect(["", ""], [""]) == ""


def test_ranks_and_workers_whose_cards_reach_no_gpu_are_named():
    reason = "nvidia_peermem is not loaded, and the driver's kernel modules are not the open ones"
    assert without_gpudirect(["", ""], [reason, "", reason]) == (
        f", which fails where network cards do not reach the memory of GPUs: {reason} (at engine worker 0, engine"
        f" worker 2); {GPUDIRECT}, or set refit.transport=tcp"
    )
    assert " (at trainer rank 1, trainer rank 2, engine worker 0); " in without_gpudirect(["", "a", "a"], ["a", "b"])


@pytest.mark.parametrize(
    ("ports", "obstacle", "backend", "by_hardware", "says"),
    [
        (True, "", "nccl", True, ""),
        (True, "no module", "nccl", True, ", which fails where network cards"),
        (True, "no module", "gloo", True, ""),
        (False, "no module", "nccl", False, ", but by way of sockets"),
    ],
)
def test_software_may_stand_in_where_a_port_is_missing_alone(ports, obstacle, backend, by_hardware, says):
    weights = SimpleNamespace(rdma_ports=lambda: [True], gpudirect_obstacles=lambda: [""])
    engines = SimpleNamespace(rdma_ports=lambda _: [ports], gpudirect_obstacles=lambda _: [obstacle])
    found = look_at_rdma(SimpleNamespace(weights=weights, backend=backend), engines, 1.0)
    assert found == Rdma(by_hardware, found.restriction)
    assert found.restriction.startswith(says)
    assert bool(found.restriction) == bool(says)
