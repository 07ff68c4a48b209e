"""Chooses senders by a pure function of piece, destination and topology, which ignores what was sent before.

So every rank computes its own part of a plan alone, and all parts are consistent.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from converters.boxes import Box
from converters.plan.regions import Cutting, Region
from converters.topology import Topology


@dataclass(frozen=True, slots=True)
class Delivery:
    """A box goes from source rank `sender` to destination rank `receiver`, which passes it on to its neighbours.

    Example: `Delivery(box, sender=0, receiver=8, relayed_to=(9, 10))`.
    """

    box: Box
    sender: int
    receiver: int
    relayed_to: tuple[int, ...] = ()


@dataclass(frozen=True)
class SenderChoice:
    """Chooses senders for `replicas` equal destinations of `workers` ranks each.

    - The nearest owners of a piece send it: those on the same GPU, else those on the same node, else all.
    - The n nearest owners share the sending. If sources and destinations are on separate nodes, replica r asks owner
      r modulo n, which is balanced if n divides the number of replicas. If it does not, a piece is cut into
      p = n / gcd(n, replicas) parts, and replica r asks for part i from owner (r p + i) modulo n. On shared nodes, a
      piece is cut into n parts, because the nearest owners then differ between replicas.
    - Pieces that cannot be cut into equal parts take turns: counting the owners starts at the tensor's rotation.

    So each of n owners of the same elements sends at most their mean load, plus one part for each destination and each
    shape of tensors that cannot be cut evenly.
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
        """The destination ranks, itself included, that may relay something to a destination rank."""
        return self._node_ranks[self.topology.destination_node[destination]] if self.node_once else (destination,)

    def node_peers(self, destination: int, workers: Container[int]) -> tuple[int, ...]:
        """The neighbours of a destination rank among `workers`, which all want the same elements."""
        neighbours = self.neighbours(destination)
        if len(neighbours) == 1:
            return neighbours
        return tuple(rank for rank in neighbours if rank % self.workers in workers)

    def is_remote(self, owners: Sequence[int], destination: int) -> bool:
        """Whether none of `owners` is on the node of a destination rank."""
        node = self.topology.destination_node[destination]
        return not self._shared_nodes or all(self.topology.source_node[owner] != node for owner in owners)

    def nearest(self, owners: tuple[int, ...], destination: int) -> tuple[int, ...]:
        """The members of `owners` nearest to a destination rank."""
        if not self._shared_nodes or len(owners) == 1:
            return owners
        place = self.topology
        for side in ("gpu", "node"):
            here = getattr(place, f"destination_{side}")[destination]
            where = getattr(place, f"source_{side}")
            if near := tuple(owner for owner in owners if where[owner] == here):
                return near
        return owners

    def deliveries(self, rotation: int, region: Region, peers: tuple[int, ...]) -> Iterator[Delivery]:
        """The deliveries of `region` to `peers`, destination ranks of one node; `rotation` counts tensors of its shape.

        Data from another node enters once: each of the peers fetches one part and relays it to the others.
        """
        if len(peers) == 1 or not self.is_remote(region.owners, peers[0]):
            for destination in peers:
                yield from self._fetch(rotation, region.box, region.owners, destination, ())
            return
        for number, part in enumerate(self.cutting.cut(region.box, len(peers))):
            chosen = (number + rotation) % len(peers)
            others = peers[:chosen] + peers[chosen + 1 :]
            yield from self._fetch(rotation, part, region.owners, peers[chosen], others)

    def _fetch(
        self, rotation: int, box: Box, owners: tuple[int, ...], destination: int, relayed_to: tuple[int, ...]
    ) -> Iterator[Delivery]:
        nearest = self.nearest(owners, destination)
        count = len(nearest)
        if count == 1:
            yield Delivery(box, nearest[0], destination, relayed_to)
            return
        replica, worker = divmod(destination, self.workers)
        parts = count if self._shared_nodes else count // gcd(count, self.replicas)
        first = replica * parts
        if parts > 1:
            first += rotation + worker
        for number, part in enumerate(self.cutting.cut(box, parts)):
            yield Delivery(part, nearest[(first + number) % count], destination, relayed_to)
