"""The choice of a sender: a pure function of piece, destination and topology, never of what was sent before.

So every rank finds its own part of a plan alone, and all of them find the same.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from converters.boxes import Box
from converters.plan.atoms import Atom, Cutting
from converters.topology import Topology


@dataclass(frozen=True, slots=True)
class Delivery:
    """A box goes from source rank `sender` to destination rank `receiver`, which passes it on to its neighbours."""

    box: Box
    sender: int
    receiver: int
    passed_on: tuple[int, ...] = ()


@dataclass(frozen=True)
class Senders:
    """Chooses for `replicas` equal destinations of `workers` ranks each.

    - The nearest of a piece's holders send it: those on the same GPU, else on the same node, else all.
    - The n nearest share the sending. Where sources and destinations have nodes of their own, replica r asks holder
      r modulo n, which is balanced if n divides the number of replicas. Where not, a piece is cut into
      p = n / gcd(n, replicas) parts, of which replica r asks for part i from holder (r p + i) modulo n. On shared nodes
      a piece is cut into n parts, since the replicas then do not see the same nearest holders.
    - A piece that cannot be cut into equal parts takes turns: the holders are counted from the tensor's turn on.

    The load of each of n holders of the same elements is so at most their mean, and one part for each destination and
    each shape of tensors that cannot be cut evenly.
    """

    topology: Topology
    replicas: int
    workers: int
    node_once: bool
    cutting: Cutting

    @cached_property
    def _shared_nodes(self) -> bool:
        return not set(self.topology.source_node).isdisjoint(self.topology.destination_node)

    @cached_property
    def _node_ranks(self) -> Mapping[int, tuple[int, ...]]:
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, node in enumerate(self.topology.destination_node):
            ranks[node].append(rank)
        return {node: tuple(on_node) for node, on_node in ranks.items()}

    def neighbours(self, destination: int) -> tuple[int, ...]:
        """The destination ranks that may pass something on to a destination rank, itself included."""
        return self._node_ranks[self.topology.destination_node[destination]] if self.node_once else (destination,)

    def group(self, destination: int, workers: Container[int]) -> tuple[int, ...]:
        """Neighbours of a destination rank that are one of `workers`, which want the same."""
        neighbours = self.neighbours(destination)
        if len(neighbours) == 1:
            return neighbours
        return tuple(rank for rank in neighbours if rank % self.workers in workers)

    def is_far(self, holders: Sequence[int], destination: int) -> bool:
        """Whether none of `holders` is on the node of a destination rank."""
        node = self.topology.destination_node[destination]
        return not self._shared_nodes or all(self.topology.source_node[holder] != node for holder in holders)

    def nearest(self, holders: tuple[int, ...], destination: int) -> tuple[int, ...]:
        """Members of `holders` that are nearest to a destination rank."""
        if not self._shared_nodes or len(holders) == 1:
            return holders
        place = self.topology
        for side in ("gpu", "node"):
            here = getattr(place, f"destination_{side}")[destination]
            where = getattr(place, f"source_{side}")
            if near := tuple(holder for holder in holders if where[holder] == here):
                return near
        return holders

    def deliveries(self, turn: int, atom: Atom, group: tuple[int, ...]) -> Iterator[Delivery]:
        """How all of `group`, destination ranks of one node, get `atom`; `turn` counts tensors of the same shape.

        Data from another node enters once: each rank of the group fetches one part and passes it on to the others.
        """
        if len(group) == 1 or not self.is_far(atom.holders, group[0]):
            for destination in group:
                yield from self._fetch(turn, atom.box, atom.holders, destination, ())
            return
        for number, part in enumerate(self.cutting.cut(atom.box, len(group))):
            chosen = (number + turn) % len(group)
            others = group[:chosen] + group[chosen + 1 :]
            yield from self._fetch(turn, part, atom.holders, group[chosen], others)

    def _fetch(
        self, turn: int, box: Box, holders: tuple[int, ...], destination: int, passed_on: tuple[int, ...]
    ) -> Iterator[Delivery]:
        nearest = self.nearest(holders, destination)
        count = len(nearest)
        if count == 1:
            yield Delivery(box, nearest[0], destination, passed_on)
            return
        replica, worker = divmod(destination, self.workers)
        parts = count if self._shared_nodes else count // gcd(count, self.replicas)
        first = replica * parts
        if parts > 1:
            first += turn + worker
        for number, part in enumerate(self.cutting.cut(box, parts)):
            yield Delivery(part, nearest[(first + number) % count], destination, passed_on)
