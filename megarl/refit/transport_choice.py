"""Chooses a transport. Restrictions of rdma are worded as the end of a sentence about the path of refits."""

from collections.abc import Sequence
from dataclasses import dataclass

from converters.topology import Topology
from megarl.cluster.engines.engines import Engines
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.process.gpudirect import GPUDIRECT
from megarl.resharding.direct.transports import MAPPED_MEMORY_TRANSPORT
from megarl.resharding.direct.transports.nixl_agent import INSTALL, is_installed
from megarl.schema import RefitConfig

_NAMED = 4


@dataclass(frozen=True)
class Rdma:
    """Whether only hardware may move bytes, and the restrictions of rdma, or why it is not used.

    Example: `Rdma(by_hardware=True, restriction="")`.
    """

    by_hardware: bool
    restriction: str


NO_RDMA = Rdma(by_hardware=False, restriction="")
"""rdma plays no part."""

_BRING_UP = "If the machines have ports, bring them up and show them to the containers; else"
_WITHOUT_PORTS = {
    "auto": (
        "tcp",
        f", as {{}}. {_BRING_UP} on a network slower than a few Gbit/s refit.delta=true lets changes alone travel",
    ),
    "rdma": (
        "rdma",
        f", but by way of sockets: {{}}. {_BRING_UP} set refit.transport=auto, which is tcp there: an engine that dies"
        " while it reads through sockets may end trainer ranks, and the run then goes on from its last checkpoint",
    ),
}
"""Requested transport -> the transport if processes lack ports, and the sentence about it."""


@dataclass(frozen=True)
class Route:
    """The transports of a refit: `transport` for all bytes, or `within` for those that stay on a machine.

    Example: `Route("tcp", NO_RDMA, within="shared_memory")`; on one machine `within` is empty.
    """

    transport: str
    rdma: Rdma
    within: str = ""

    @classmethod
    def between(cls, trainer: TrainerGroup, engines: Engines, topology: Topology, config: RefitConfig) -> "Route":
        """The route between ranks and workers on their machines, by the transport that `config` asks for."""
        mapped = MAPPED_MEMORY_TRANSPORT[trainer.backend]
        if len({*topology.source_node, *topology.destination_node}) > 1:
            return cls(*between_machines(trainer, engines, config.transport, config.timeout_s), within=mapped)
        return cls(mapped if config.transport == "auto" else config.transport, NO_RDMA)

    def description(self, topology: Topology) -> str:
        """The transports that are used in a `topology`, and the restrictions of rdma."""
        within = ""
        if self.within and {*topology.source_node} & {*topology.destination_node}:
            within = f"{self.within} on one machine and, between two, "
        return f"{within}{self.transport}{self.rdma.restriction}"


def between_machines(trainer: TrainerGroup, engines: Engines, asked: str, timeout_s: float) -> tuple[str, Rdma]:
    """The transport between ranks and workers of several machines, and the restrictions of rdma.

    For `auto` it is rdma, or tcp if NIXL is missing in this environment or a worker's, or if a process has no RDMA
    port. rdma over sockets is not worth it: there UCX (1.23) has ranks send the data, and crashes a rank whose reader
    dies meanwhile; gloo is as fast and survives.
    """
    if asked not in ("auto", "rdma"):
        return asked, NO_RDMA
    if asked == "auto":
        restriction = without_nixl(engines.have_nixl(timeout_s)) if is_installed() else ""
        if restriction or not is_installed():
            return "tcp", Rdma(by_hardware=False, restriction=restriction)
    if lacking := without_ports(trainer.weights.rdma_ports(), engines.rdma_ports(timeout_s)):
        transport, restriction = _WITHOUT_PORTS[asked]
        return transport, Rdma(by_hardware=False, restriction=restriction.format(lacking))
    return "rdma", _with_gpudirect_sentence(trainer, engines, timeout_s)


def _with_gpudirect_sentence(trainer: TrainerGroup, engines: Engines, timeout_s: float) -> Rdma:
    """Ask all ranks and workers, which do have ports, for obstacles to GPUDirect."""
    restriction = ""
    if trainer.backend == "nccl":
        of_ranks, of_workers = trainer.weights.gpudirect_obstacles(), engines.gpudirect_obstacles(timeout_s)
        restriction = without_gpudirect(of_ranks, of_workers)
    return Rdma(by_hardware=True, restriction=restriction)


def without_nixl(of_workers: Sequence[bool]) -> str:
    """Say which workers' environments, the engine's own, lack NIXL; empty if none does."""
    named = _named([], [not has_nixl for has_nixl in of_workers])
    return f", as the Python of {named} has no NIXL for rdma: in its environment {INSTALL}" if named else ""


def without_ports(of_ranks: Sequence[bool], of_workers: Sequence[bool]) -> str:
    """Say which processes have no RDMA port that is up; empty if all have one."""
    named = _named([not has_port for has_port in of_ranks], [not has_port for has_port in of_workers])
    return f"no active port of InfiniBand, RoCE or EFA is seen by {named} (ibstat, /dev/infiniband)" if named else ""


def without_gpudirect(of_ranks: Sequence[str], of_workers: Sequence[str]) -> str:
    """Say which processes are on machines where GPUDirect seems not to work; empty if no obstacle is known."""
    reason = next(filter(None, [*of_ranks, *of_workers]), "")
    if not reason:
        return ""
    named = _named([each == reason for each in of_ranks], [each == reason for each in of_workers])
    return (
        f", which fails where network cards do not reach the memory of GPUs: {reason} (at {named}); {GPUDIRECT},"
        " or set refit.transport=tcp"
    )


def _named(of_ranks: Sequence[bool], of_workers: Sequence[bool]) -> str:
    all_of_them = [
        *(f"trainer rank {rank}" for rank, is_one in enumerate(of_ranks) if is_one),
        *(f"engine worker {worker}" for worker, is_one in enumerate(of_workers) if is_one),
    ]
    others = len(all_of_them) - _NAMED
    return ", ".join(all_of_them[:_NAMED]) + (f" and {others} others" if others > 0 else "")
