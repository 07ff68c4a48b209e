"""Machines without a port for RDMA, or whose ports reach no GPU, are named, on either side, with what to do."""

from types import SimpleNamespace

import pytest

from megarl.process.gpudirect import GPUDIRECT
from megarl.refit.rdma_restrictions import (
    NO_RDMA,
    Rdma,
    between_machines,
    look_at_rdma,
    without_gpudirect,
    without_ports,
)
from megarl.resharding.direct.transports import nixl_agent


def test_where_all_have_a_port_nothing_is_said():
    assert without_ports([True, True], [True]) == ""


def test_ranks_and_workers_without_a_port_are_named():
    assert without_ports([True, True], [False, True]) == (
        ", but by way of sockets: no active port of InfiniBand, RoCE or EFA is seen by engine worker 0 (ibstat,"
        " /dev/infiniband). If the machines have ports, bring them up and show them to the containers; if they have"
        " none, and a network slower than a few Gbit/s, refit.delta=true lets changes alone travel"
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


def chosen(asked, *of_workers):
    """The transport between machines whose workers have NIXL, or not, and all else."""
    weights = SimpleNamespace(rdma_ports=lambda: [True], gpudirect_obstacles=lambda: [""])
    engines = SimpleNamespace(
        have_nixl=lambda _: of_workers, rdma_ports=lambda _: [True], gpudirect_obstacles=lambda _: [""]
    )
    return between_machines(SimpleNamespace(weights=weights, backend="nccl"), engines, asked, 1.0)


def test_rdma_is_chosen_where_ranks_and_workers_have_nixl(monkeypatch):
    by_hardware = Rdma(by_hardware=True, restriction="")
    assert chosen("auto", True, True) == ("rdma", by_hardware)
    assert chosen("tcp", True) == ("tcp", NO_RDMA)
    # An engine's own environment, which has Python packages of its own.
    transport, why = chosen("auto", True, False)
    assert transport == "tcp"
    assert why.restriction.startswith(", as the Python of engine worker 1 has no NIXL for rdma: in its environment pip")
    assert chosen("rdma", True, False) == ("rdma", by_hardware)
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ())
    assert chosen("auto", True, True) == ("tcp", NO_RDMA)
