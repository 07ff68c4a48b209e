"""Who runs where, in a cluster of machines that are only said to be there."""

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

# Cores are not what a job of GPUs is short of.
_CPUS = 1024
_ADDRESS = "rehearsed"


def place_job(
    config: MegarlConfig, models: "Sequence[RankModel]", *, gpus_per_node: int, nodes: int | None
) -> NodesByRole:
    """The machine of every rank and engine, by the code that places them in a run, on as few machines as hold them.

    With `nodes` there are so many. Raises UserError where they cannot be placed.
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
    """How many machines each role is on.

    Example: "48 machines of 8 GPUs: trainer on 32, engine on 16"
    """
    machines = {node.id for nodes in placement.values() for node in nodes}
    parts = ", ".join(f"{name} on {len({node.id for node in nodes})}" for name, nodes in placement.items())
    return f"{len(machines)} machine{'s' if len(machines) > 1 else ''} of {gpus_per_node} GPUs: {parts}"
