"""Restrictions of refits by rdma, as the end of a sentence that says through what they go: who, why, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.cluster.engines.engines import Engines
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.process.gpudirect import GPUDIRECT

_NAMED = 4


@dataclass(frozen=True)
class Rdma:
    """Whether hardware alone is to move bytes, and what restricts it.

    Example: `Rdma(by_hardware=True, restriction="")`.
    """

    by_hardware: bool
    restriction: str


NO_RDMA = Rdma(by_hardware=False, restriction="")
"""Where nothing goes by it."""


def look_at_rdma(trainer: TrainerGroup, engines: Engines, timeout_s: float) -> Rdma:
    """Ask all ranks and workers for their ports, and for what keeps these from GPUs."""
    restriction = without_ports(trainer.weights.rdma_ports(), engines.rdma_ports(timeout_s))
    if restriction:
        return Rdma(by_hardware=False, restriction=restriction)
    if trainer.backend == "nccl":
        of_ranks, of_workers = trainer.weights.gpudirect_obstacles(), engines.gpudirect_obstacles(timeout_s)
        restriction = without_gpudirect(of_ranks, of_workers)
    return Rdma(by_hardware=True, restriction=restriction)


def without_ports(of_ranks: Sequence[bool], of_workers: Sequence[bool]) -> str:
    """Which processes have no port for RDMA that is up; empty if all have."""
    named = _named([not has_port for has_port in of_ranks], [not has_port for has_port in of_workers])
    if not named:
        return ""
    return (
        f", but by way of sockets: no active port of InfiniBand, RoCE or EFA is seen by {named} (ibstat,"
        " /dev/infiniband). If the machines have ports, bring them up and show them to the containers; else"
        " refit.delta=true lets changes alone travel"
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
