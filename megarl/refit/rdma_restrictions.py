"""Refits by rdma: where they are, and their restrictions, as the end of a sentence that says through what they go."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.cluster.engines.engines import Engines
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.process.gpudirect import GPUDIRECT
from megarl.resharding.direct.transports.nixl_agent import INSTALL, is_installed

_NAMED = 4


@dataclass(frozen=True)
class Rdma:
    """Whether hardware alone is to move bytes, and what restricts it, or why there is none.

    Example: `Rdma(by_hardware=True, restriction="")`.
    """

    by_hardware: bool
    restriction: str


NO_RDMA = Rdma(by_hardware=False, restriction="")
"""Where nothing goes by it."""


def between_machines(trainer: TrainerGroup, engines: Engines, asked: str, timeout_s: float) -> tuple[str, Rdma]:
    """The transport between ranks and workers of several machines, and what there is to say of rdma.

    Where `auto` is asked for it is rdma, or tcp where this environment or a worker's is without the package for it.
    """
    if asked == "auto":
        restriction = without_nixl(engines.have_nixl(timeout_s)) if is_installed() else ""
        if restriction or not is_installed():
            return "tcp", Rdma(by_hardware=False, restriction=restriction)
    elif asked != "rdma":
        return asked, NO_RDMA
    return "rdma", look_at_rdma(trainer, engines, timeout_s)


def look_at_rdma(trainer: TrainerGroup, engines: Engines, timeout_s: float) -> Rdma:
    """Ask all ranks and workers for their ports, and for what keeps these from GPUs."""
    restriction = without_ports(trainer.weights.rdma_ports(), engines.rdma_ports(timeout_s))
    if restriction:
        return Rdma(by_hardware=False, restriction=restriction)
    if trainer.backend == "nccl":
        of_ranks, of_workers = trainer.weights.gpudirect_obstacles(), engines.gpudirect_obstacles(timeout_s)
        restriction = without_gpudirect(of_ranks, of_workers)
    return Rdma(by_hardware=True, restriction=restriction)


def without_nixl(of_workers: Sequence[bool]) -> str:
    """Which workers have an environment, an engine's own, that lacks NIXL; empty if none does."""
    named = _named([], [not has_nixl for has_nixl in of_workers])
    return f", as the Python of {named} has no NIXL for rdma: in its environment {INSTALL}" if named else ""


def without_ports(of_ranks: Sequence[bool], of_workers: Sequence[bool]) -> str:
    """Which processes have no port for RDMA that is up; empty if all have."""
    named = _named([not has_port for has_port in of_ranks], [not has_port for has_port in of_workers])
    if not named:
        return ""
    return (
        f", but by way of sockets: no active port of InfiniBand, RoCE or EFA is seen by {named} (ibstat,"
        " /dev/infiniband). If the machines have ports, bring them up and show them to the containers; if they have"
        " none, and a network slower than a few Gbit/s, refit.delta=true lets changes alone travel"
    )


def without_gpudirect(of_ranks: Sequence[str], of_workers: Sequence[str]) -> str:
    """Which processes are on machines whose network cards do not seem to reach GPUs; empty if no obstacle is known."""
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
