"""Pools: machines, or parts of machines, reserved for some roles of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from converters.errors import UserError
from megarl.cluster.placement.placement import Node, NodesByRole, Role, list_machines, number, place
from megarl.schema import PoolConfig


class _Part(NamedTuple):
    """Roles, and the machines that they are placed on.

    Example: _Part("cluster.pools.training: ", [Role("trainer", ...)], [Node("4f0c", "10.0.0.7", cpus=96, gpus=8)])
    """

    prefix: str
    """Prefix of error messages."""
    roles: list[Role]
    nodes: list[Node]
    shared: bool = False
    """Whether the roles take turns on the same GPUs."""


def place_in_pools(roles: Sequence[Role], nodes: Sequence[Node], pools: Mapping[str, PoolConfig]) -> NodesByRole:
    """Place roles as `place`: those named by a pool on its machines, all others on the rest.

    Also raises UserError if a pool asks for more than there is.
    """
    placement: NodesByRole = {}
    for part in _divide(roles, nodes, pools):
        try:
            placement |= _in_turns(part) if part.shared else place(part.roles, part.nodes)
        except UserError as error:
            raise UserError(f"{part.prefix}{error}") from error
    return {role.name: placement[role.name] for role in roles}


def _in_turns(part: _Part) -> NodesByRole:
    """Place as `place`, but give every role all GPUs, in turns. Cores are divided, as all processes are alive."""
    placement: NodesByRole = {}
    cpus = {node.id: node.cpus for node in part.nodes}
    for role in part.roles:
        placement |= place([role], [replace(node, cpus=cpus[node.id]) for node in part.nodes])
        for node in placement[role.name]:
            cpus[node.id] -= role.cpus
    return placement


def _divide(roles: Sequence[Role], nodes: Sequence[Node], pools: Mapping[str, PoolConfig]) -> Iterator[_Part]:
    left = {node.id: node for node in sorted(nodes, key=lambda node: (-node.gpus, number(node)))}
    whole = dict(left)
    # Pools of whole machines come first, so that partial ones do not get in their way.
    for name, pool in sorted(pools.items(), key=lambda each: each[1].gpus is not None):
        own = [role for role in roles if role.name in pool.roles]
        # A command without a pool's roles leaves the pool's machines alone.
        chosen = [node for node in left.values() if _has(node, pool, whole)][: pool.nodes if own else 0]
        if own and len(chosen) < pool.nodes:
            asked = f"{pool.nodes} machines{'' if pool.gpus is None else f' with {pool.gpus} GPUs'}"
            raise UserError(
                f"cluster.pools.{name} asks for {asked}, and {len(chosen)} that no other pool has are there: the"
                f" cluster is {list_machines(nodes)}. Lower cluster.pools.{name}.nodes, or add machines"
            )
        parts = [_part(node, pool, whole[node.id]) for node in chosen]
        for node, part in zip(chosen, parts, strict=True):
            left[node.id] = replace(node, cpus=node.cpus - part.cpus, gpus=node.gpus - part.gpus)
        if own:
            yield _Part(f"cluster.pools.{name}: ", own, parts, pool.shared)
    pooled = {role for pool in pools.values() for role in pool.roles}
    if others := [role for role in roles if role.name not in pooled]:
        nodes_left = [node for node in left.values() if node.cpus or node.gpus]
        yield _Part("beside cluster.pools: " if pools else "", others, nodes_left)


def _has(node: Node, pool: PoolConfig, whole: Mapping[str, Node]) -> bool:
    return node == whole[node.id] if pool.gpus is None else node.gpus >= pool.gpus


def _part(node: Node, pool: PoolConfig, whole: Node) -> Node:
    """The part of a machine that a pool takes: GPUs, with a proportional share of the CPUs."""
    if pool.gpus is None:
        return node
    return replace(node, cpus=whole.cpus * pool.gpus / whole.gpus, gpus=pool.gpus)
