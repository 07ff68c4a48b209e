"""Reserves resources for all processes of a run at once, as a Ray placement group."""

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from converters.errors import UserError
from megarl.cluster.placement.placement import Node, NodesByRole, Role
from megarl.cluster.placement.pools import place_in_pools
from megarl.process.phase import phase
from megarl.schema import ClusterConfig

_NODE = "ray.io/node-id"
"""Label of every machine."""
_ATTEMPT_S = 10.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Seats:
    """The reserved resources of a role's processes: one bundle of a placement group for each."""

    role: Role
    nodes: list[Node]
    """The machine of each process."""
    group: PlacementGroup
    first_bundle: int
    timeout_s: float
    """How long the processes may take to come up."""
    silence_s: float
    """How long each process may be silent."""
    shared_gpus: list[list[str]] | None = None
    """The GPUs of each process, by Ray's numbers on its machine, if they are shared with others; else Ray assigns them.
    """

    def __len__(self) -> int:
        return self.role.processes

    def strategy(self, process: int) -> PlacementGroupSchedulingStrategy:
        """The Ray scheduling strategy that places a process in its seat."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.first_bundle + process)


@contextmanager
def reserve(roles: Sequence[Role], cluster: ClusterConfig) -> Iterator[dict[str, Seats]]:
    """Reserve seats for all processes of all roles; yields them by role name.

    Waits for other runs on the cluster to end. Raises UserError at once for what can never fit, and after
    `cluster.start_timeout_s` for what did not become free.
    """
    placement, group = _take(roles, cluster)
    given = _gpus_to_share(roles, placement, cluster.sharing(), group)
    seats, first = {}, 0
    for role in roles:
        seats[role.name] = Seats(
            role,
            placement[role.name],
            group,
            first,
            timeout_s=cluster.start_timeout_s,
            silence_s=cluster.silence_timeout_s,
            shared_gpus=given.get(role.name),
        )
        first += role.processes
    yield seats
    # Not after a failure, which may be Ray's own. Ray frees everything anyway when the run disconnects.
    remove_placement_group(group)


def _take(roles: Sequence[Role], cluster: ClusterConfig) -> tuple[NodesByRole, PlacementGroup]:
    place_in_pools(roles, _everything(cluster), cluster.pools)
    if (taken := _try(roles, cluster)) is not None:
        return taken
    deadline = time.monotonic() + cluster.start_timeout_s
    with phase("waiting for what others of the cluster have"):
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if (taken := _try(roles, cluster)) is not None:
                return taken
    # Check again, as a machine may have been lost meanwhile.
    place_in_pools(roles, _everything(cluster), cluster.pools)
    raise UserError(
        f"after {cluster.start_timeout_s:g} s others still have what the run needs: {_still(_free(cluster))}. Wait for"
        " them, or raise cluster.start_timeout_s"
    )


def _try(roles: Sequence[Role], cluster: ClusterConfig) -> tuple[NodesByRole, PlacementGroup] | None:
    if (placement := _find(roles, _free(cluster), cluster)) is None:
        return None
    group = _group(roles, placement, cluster.sharing())
    if group.wait(_ATTEMPT_S):
        return placement, group
    # Another run took the resources first.
    remove_placement_group(group)
    return None


def _everything(cluster: ClusterConfig) -> list[Node]:
    return _nodes({node["NodeID"]: node["Resources"] for node in ray.nodes()}, cluster.gpu_share)


def _free(cluster: ClusterConfig) -> list[Node]:
    return _nodes(available_resources_per_node(), cluster.gpu_share)


def _find(roles: Sequence[Role], free: Sequence[Node], cluster: ClusterConfig) -> NodesByRole | None:
    """Find a placement on free resources; None while others use what the run needs."""
    try:
        return place_in_pools(roles, free, cluster.pools)
    except UserError:
        return None


def _group(roles: Sequence[Role], placement: NodesByRole, sharing: Collection[str]) -> PlacementGroup:
    """Create a group with a bundle per process, then one per machine for the GPUs that some processes share."""
    seats = [(role, node) for role in roles for node in placement[role.name]]
    shared = gpus_shared(roles, placement, sharing)
    return placement_group(
        [{"CPU": role.cpus, "GPU": 0 if role.name in sharing else role.gpus} for role, _ in seats]
        + [{"GPU": gpus} for gpus in shared.values()],
        bundle_label_selector=[{_NODE: node} for node in (*(node.id for _, node in seats), *shared)],
    )


def gpus_shared(roles: Sequence[Role], placement: NodesByRole, sharing: Collection[str]) -> dict[str, float]:
    """Machine -> number of its GPUs that the `sharing` roles need: the maximum over the roles."""
    shared: dict[str, float] = {}
    for role in roles:
        if role.name in sharing and role.gpus:
            for node, processes in Counter(node.id for node in placement[role.name]).items():
                shared[node] = max(shared.get(node, 0), processes * role.gpus)
    return shared


def _gpus_to_share(
    roles: Sequence[Role], placement: NodesByRole, sharing: Collection[str], group: PlacementGroup
) -> dict[str, list[list[str]]]:
    """The GPUs of each process of the sharing roles, by role name; empty without GPUs."""
    shared, processes = gpus_shared(roles, placement, sharing), sum(role.processes for role in roles)
    asking = [
        ray.remote(num_cpus=0, num_gpus=gpus)(_gpus_here)
        .options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle))
        .remote()
        for bundle, gpus in enumerate(shared.values(), processes)
    ]
    there = dict(zip(shared, ray.get(asking), strict=True))
    return {
        role.name: deal_gpus(role, placement[role.name], there) for role in roles if role.name in sharing and shared
    }


def deal_gpus(role: Role, nodes: Sequence[Node], there: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Assign GPUs to each process of a role on `nodes`: on a machine, GPU numbers ascend with the processes.

    Example: for two processes of 2 GPUs on machine "a", with {"a": ["4", "5", "6", "7"]}, [["4", "5"], ["6", "7"]].
    """
    each, dealt = int(role.gpus), Counter[str]()
    found = []
    for node in nodes:
        found.append(list(there[node.id][dealt[node.id] : dealt[node.id] + each]))
        dealt[node.id] += each
    return found


def _gpus_here() -> list[str]:
    """The GPUs that Ray assigned to the calling process, in order."""
    return sorted(ray.get_runtime_context().get_accelerator_ids()["GPU"], key=lambda gpu: (len(gpu), gpu))


def _nodes(resources: Mapping[str, Mapping[str, float]], gpu_share: float) -> list[Node]:
    """The machines that are up, with these resources."""
    # A process's share is always of one GPU, so round down to whole shares per GPU.
    part = int(1 / gpu_share) * gpu_share if gpu_share < 1 else 1
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            cpus=resources.get(node["NodeID"], {}).get("CPU", 0),
            gpus=int(resources.get(node["NodeID"], {}).get("GPU", 0)) * part,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _still(free: Sequence[Node]) -> str:
    return ", ".join(f"{node.address} has {node.cpus:g} CPUs and {node.gpus:g} GPUs free" for node in free)
