"""Places ranks and engines on the machines of a hypothetical cluster."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.cluster.placement.placement import Node, NodesByRole
from megarl.cluster.placement.pools import place_in_pools
from megarl.cluster.placement.roles import engine_role, trainer_role
from megarl.schema import MegarlConfig

if TYPE_CHECKING:
    from megarl.rehearsal.trainer_rank import RankModel

# CPU cores are not the limit of jobs on GPUs.
_CPUS = 1024
_ADDRESS = "rehearsed"


def place_job(
    config: MegarlConfig, models: "Sequence[RankModel]", *, gpus_per_node: int, nodes: int | None
) -> NodesByRole:
    """The machine of every rank and engine, from the placement code of a run, on as few machines as suffice.

    With `nodes`, on exactly that many. Raises UserError if they do not fit.
    """
    cluster = replace(config.cluster, address=config.cluster.address or _ADDRESS)
    roles = [trainer_role(each.name, each.options.parallel, cluster, has_gpus=True) for each in models]
    roles.append(engine_role(cluster, config.rollout, has_gpus=True))
    most = sum(role.processes for role in roles)
    for count in [nodes] if nodes else range(1, most + 1):
        machines = [
            Node(str(number), f"10.0.{number // 250}.{number % 250}", _CPUS, gpus_per_node) for number in range(count)
        ]
        try:
            return place_in_pools(roles, machines, cluster.pools)
        except UserError:
            if count == (nodes or most):
                raise
    raise AssertionError("a job has a process")


def say_placement(placement: NodesByRole, gpus_per_node: int) -> str:
    """Say how many machines each role is on.

    Example: "48 machines of 8 GPUs: trainer on 32, engine on 16"
    """
    machines = {node.id for nodes in placement.values() for node in nodes}
    parts = ", ".join(f"{name} on {len({node.id for node in nodes})}" for name, nodes in placement.items())
    return f"{len(machines)} machine{'s' if len(machines) > 1 else ''} of {gpus_per_node} GPUs: {parts}"
