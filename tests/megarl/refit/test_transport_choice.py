"""The transport that is chosen; machines without a port, or whose ports reach no GPU, are named, with what to do."""

from types import SimpleNamespace

import pytest

from megarl.process.gpudirect import GPUDIRECT
from megarl.refit.transport_choice import (
    NO_RDMA,
    Rdma,
    between_machines,
    without_gpudirect,
    without_ports,
)
from megarl.resharding.direct.transports import nixl_agent


def test_where_all_have_a_port_nothing_is_said():
    assert without_ports([True, True], [True]) == ""


def test_ranks_and_workers_without_a_port_are_named():
    assert without_ports([True, True], [False, True]) == (
        "no active port of InfiniBand, RoCE or EFA is seen by engine worker 0 (ibstat, /dev/infiniband)"
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


def chosen(asked, *, nixl=(True,), of_ranks=(True,), of_workers=(True,), obstacle="", backend="nccl"):
    """The transport between machines whose workers have NIXL, and whose processes ports, or not."""
    weights = SimpleNamespace(rdma_ports=lambda: of_ranks, gpudirect_obstacles=lambda: [""])
    engines = SimpleNamespace(
        have_nixl=lambda _: nixl, rdma_ports=lambda _: of_workers, gpudirect_obstacles=lambda _: [obstacle]
    )
    return between_machines(SimpleNamespace(weights=weights, backend=backend), engines, asked, 1.0)


BY_HARDWARE = Rdma(by_hardware=True, restriction="")


def test_rdma_is_chosen_where_ranks_and_workers_have_nixl(monkeypatch):
    assert chosen("auto", nixl=(True, True)) == ("rdma", BY_HARDWARE)
    assert chosen("tcp") == ("tcp", NO_RDMA)
    # An engine's own environment, which has Python packages of its own.
    transport, why = chosen("auto", nixl=(True, False))
    assert transport == "tcp"
    assert why.restriction.startswith(", as the Python of engine worker 1 has no NIXL for rdma: in its environment pip")
    assert chosen("rdma", nixl=(True, False)) == ("rdma", BY_HARDWARE)
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ())
    assert chosen("auto") == ("tcp", NO_RDMA)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("without", ["of_ranks", "of_workers"])
def test_where_a_port_is_missing_it_is_rdma_only_by_name_and_the_sentence_says_what_may_happen(without, backend):
    lacking = {without: (False, True), "obstacle": "no module", "backend": backend}
    transport, why = chosen("auto", **lacking)
    assert (transport, why.by_hardware) == ("tcp", False)
    assert why.restriction.startswith(", as no active port of InfiniBand, RoCE or EFA is seen by ")
    assert why.restriction.endswith(
        " containers; else on a network slower than a few Gbit/s refit.delta=true lets changes alone travel"
    )
    transport, why = chosen("rdma", **lacking)
    assert (transport, why.by_hardware) == ("rdma", False)
    assert why.restriction.startswith(", but by way of sockets: no active port of InfiniBand, RoCE or EFA is seen by ")
    assert " containers; else set refit.transport=auto, which is tcp there: an engine that dies " in why.restriction
    assert chosen("tcp", **lacking) == ("tcp", NO_RDMA)


@pytest.mark.parametrize("asked", ["auto", "rdma"])
def test_cards_that_do_not_reach_gpus_are_told_of_where_there_are_gpus(asked):
    transport, why = chosen(asked, obstacle="no module")
    assert (transport, why.by_hardware) == ("rdma", True)
    assert why.restriction.startswith(", which fails where network cards")
    assert chosen(asked, obstacle="no module", backend="gloo") == ("rdma", BY_HARDWARE)
