"""Placement as a pure function of what a run's processes need and what the machines have."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, permutations
from typing import TypeAlias

from converters.errors import UserError

_KINDS = ("gpus", "cpus")
_NEXT_TO_NOTHING = 0.001
_ORDERS_TRIED = 120
# Tolerance for sums of GPU shares, such as 0.1, which is not exact in binary.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, or a part of it.

    Example: Node("4f0c", "10.0.0.7", cpus=96, gpus=8)
    """

    id: str
    """As Ray names it."""
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Role:
    """Processes of a run with the same task, and the resources of each.

    Example: Role("trainer", processes=8, cpus=1, gpus=1, group=4) are two groups of four ranks, each on one machine;
    Role("engine", processes=4, cpus=1, gpus=8, group=2, apart=True) are two engines, each on two machines.
    """

    name: str
    processes: int
    cpus: float
    gpus: float
    group: int = 1
    """Number of consecutive processes that belong together."""
    apart: bool = False
    """Whether each process of a group must be on a different machine; else a group is on one machine if possible."""
    environment: Mapping[str, str] = field(default_factory=dict)


NodesByRole: TypeAlias = dict[str, list[Node]]
"""Name of a role -> the machine of each of its processes."""


def place(roles: Sequence[Role], nodes: Sequence[Node]) -> NodesByRole:
    """Place every process on a machine. The order of machines depends only on their addresses.

    Process numbers ascend with the machines. Raises UserError, with the arithmetic, if not all processes fit.
    """
    if (placement := find_place(roles, nodes)) is None:
        raise UserError(_why_not(roles, nodes))
    return placement


def find_place(roles: Sequence[Role], nodes: Sequence[Node]) -> NodesByRole | None:
    """As `place`, but returns None if not all processes fit."""
    if any(_needed(roles, kind) > _given(nodes, kind) + _ROUNDING for kind in _KINDS):
        return None
    nodes = sorted(nodes, key=number)
    largest = max((node.gpus for node in nodes), default=0)
    roles = sorted(roles, key=lambda role: (-_unit(role, largest) * role.gpus, -_unit(role, largest) * role.cpus))
    for may_fall_apart in (False, True):
        # Placing the largest first suffices if sizes divide each other, as they mostly do; else try other orders.
        for order in islice(permutations(roles), _ORDERS_TRIED):
            filling = _Filling(nodes, largest, may_fall_apart=may_fall_apart)
            if all(filling.add(role) for role in order):
                return {role.name: filling.placement[role.name] for role in roles}
    return None


class _Filling:
    """Machines being filled role by role."""

    def __init__(self, nodes: Sequence[Node], largest: float, *, may_fall_apart: bool) -> None:
        self.placement: NodesByRole = {}
        self._nodes, self._largest, self._may_fall_apart = nodes, largest, may_fall_apart
        self._free = [(node.cpus, node.gpus) for node in nodes]

    def add(self, role: Role) -> bool:
        """Place all processes of a role; return whether they fit."""
        places: list[int] = []
        unit = role.group if role.apart else _unit(role, self._largest)
        for _ in range(0, role.processes, unit):
            chosen = self._apart(role) if role.apart else self._together(role, unit)
            if chosen is None:
                return False
            places += chosen
        self.placement[role.name] = [self._nodes[place] for place in places]
        return True

    def _together(self, role: Role, unit: int) -> list[int] | None:
        place = next((place for place in range(len(self._nodes)) if self._room(place, role) >= unit), None)
        if place is not None:
            return self._take(role, [place] * unit)
        if unit > 1 and self._may_fall_apart:
            parts = [self._together(role, 1) for _ in range(unit)]
            return None if None in parts else [place for part in parts for place in part or ()]
        return None

    def _apart(self, role: Role) -> list[int] | None:
        # Take the machines with the most room, so that the last engine finds as many as the first.
        by_room = sorted(range(len(self._nodes)), key=lambda place: (-self._room(place, role), place))[: role.group]
        if len(by_room) < role.group or self._room(by_room[-1], role) < 1:
            return None
        return self._take(role, sorted(by_room))

    def _room(self, place: int, role: Role) -> int:
        return _fitting(*self._free[place], role)

    def _take(self, role: Role, places: list[int]) -> list[int]:
        for place in places:
            cpus, gpus = self._free[place]
            self._free[place] = cpus - role.cpus, gpus - role.gpus
        return places


def _fitting(cpus: float, gpus: float, role: Role) -> int:
    """How many processes of a role fit these resources."""
    counts = [
        int(free / asked + _ROUNDING) for free, asked in ((cpus, role.cpus), (gpus, role.gpus)) if asked > _ROUNDING
    ]
    return min(counts, default=role.processes)


def _unit(role: Role, largest: float) -> int:
    """How many consecutive processes go to one machine: a group, or the largest part of one that fits."""
    if role.apart or not role.gpus:
        return 1 if role.apart else role.group
    holds = max(1, int(largest / role.gpus + _ROUNDING))
    return max(size for size in range(1, role.group + 1) if role.group % size == 0 and size <= holds)


def number(node: Node) -> tuple[list[tuple[int, str]], str]:
    """Sort key for machines by address: 10.0.0.9 comes before 10.0.0.10."""
    return [(len(part), part) for part in node.address.split(".")], node.id


def _needed(roles: Sequence[Role], kind: str) -> float:
    return sum(role.processes * getattr(role, kind) for role in roles)


def _given(nodes: Sequence[Node], kind: str) -> float:
    return sum(getattr(node, kind) for node in nodes)


def _why_not(roles: Sequence[Role], nodes: Sequence[Node]) -> str:
    for kind in _KINDS:
        need, have = _needed(roles, kind), _given(nodes, kind)
        if need > have + _ROUNDING:
            return (
                f"{_asked(roles, kind)} need {need:g} {kind[:-1].upper()}s; there are {have:g}:"
                f" {list_machines(nodes, kind)}. Take fewer or smaller ones, or more machines"
            )
    machines = list_machines(nodes)
    for role in roles:
        holding = sum(_fitting(node.cpus, node.gpus, role) > 0 for node in nodes)
        if role.apart and holding < role.group:
            return (
                f"an engine over {role.group} machines needs {_of(role)} on each; of {machines} {holding} have as much."
                " Lower rollout.engine_args.nnodes, or add machines"
            )
        if not holding:
            return (
                f"a process of {role.name} needs {_of(role)} of one machine, and there are {machines}. Make it smaller,"
                " or span machines with it (rollout.engine_args.nnodes)"
            )
    return (
        f"{_asked(roles)} do not fit beside each other on {machines}, which have as much in all. Choose sizes that"
        " divide those of a machine"
    )


def _asked(roles: Sequence[Role], *kinds: str) -> str:
    return " and ".join(
        f"{role.processes} {role.name} process{'es' if role.processes > 1 else ''} of {_of(role, *kinds)}"
        for role in roles
        if not kinds or _needed([role], *kinds)
    )


def _of(each: Role | Node, *kinds: str) -> str:
    """Describe the resources of a process or machine, of the given kinds or all; negligible amounts count as none."""
    sizes = [(kind, getattr(each, kind)) for kind in kinds or _KINDS]
    shown = [(kind, size) for kind, size in sizes if size > _NEXT_TO_NOTHING] or sizes[:1]
    return " and ".join(f"{size:g} {kind[:-1].upper()}{'s' if size != 1 else ''}" for kind, size in shown)


def list_machines(nodes: Sequence[Node], *kinds: str) -> str:
    """Describe how many machines there are of each size."""
    alike = Counter(_of(node, *kinds) for node in sorted(nodes, key=lambda node: (node.gpus, node.cpus)))
    return ", ".join(f"{count} machine{'s' if count > 1 else ''} of {size}" for size, count in alike.items()) or "none"


def table(placement: NodesByRole, sharing: Collection[str] = ()) -> list[str]:
    """Describe a placement, one line per machine in address order; the `sharing` roles take turns.

    Example: ["10.0.0.7   trainer 0-7", "10.0.0.8   engine 0-1, critic 0-3"], or for roles that share
    ["10.0.0.7   trainer 0-7 and engine 0-3 in turns"]
    """
    on: dict[Node, dict[str, list[int]]] = {}
    for name, nodes in placement.items():
        for process, node in enumerate(nodes):
            # Parts of a machine are listed under the machine.
            on.setdefault(Node(node.id, node.address, 0, 0), {}).setdefault(name, []).append(process)
    width = max((len(node.address) for node in on), default=0)
    return [f"{node.address:{width}}   {_on_one(on[node], sharing)}" for node in sorted(on, key=number)]


def _on_one(processes: Mapping[str, list[int]], sharing: Collection[str]) -> str:
    alone = [_numbered(name, own) for name, own in processes.items() if name not in sharing]
    together = [_numbered(name, own) for name, own in processes.items() if name in sharing]
    if len(together) > 1:
        together = [f"{' and '.join(together)} in turns"]
    return ", ".join([*together, *alone])


def _numbered(name: str, processes: list[int]) -> str:
    return f"{name} {' '.join(_runs(processes))}"


def _runs(numbers: list[int]) -> Iterator[str]:
    """Ascending numbers as ranges, such as 0-3 7."""
    for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
        own = [number for _, number in run]
        yield str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}"
