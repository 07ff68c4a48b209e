"""The traffic of a plan, counted over classes of equal tensors instead of transfer by transfer."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from math import lcm

import numpy as np

from converters.boxes import Box, first_overlap
from converters.cost.classes import TensorClass, tensor_classes
from converters.cost.formats import TensorFormat
from converters.cost.traffic_matrix import Traffic
from converters.gc_pause import gc_paused
from converters.plan import Plan
from converters.plan.regions import Region, regions


@gc_paused()
def traffic(plan: Plan, formats: Mapping[str, TensorFormat]) -> Traffic:
    """The bytes of all transfers and relays of `plan`, whose HF tensors are in `formats`.

    Raises ValueError as the parts of `plan` would: if the destination's boxes overlap or leave a gap, or if no source
    rank holds an element.
    """
    count = _Count(plan)
    for tensors in tensor_classes(plan.source, plan.destination, formats):
        count.add(tensors)
    return count.traffic()


class _Count:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ranks = plan.destination_ranks
        # Lists, because updating single elements of an array is slow.
        self._direct = [0] * (plan.source.ranks * self._ranks)
        self._relayed = [0] * (self._ranks * self._ranks)
        self._needed = [0] * plan.destination.ranks
        self._staged = [0] * plan.destination.ranks
        self._entering = [0] * plan.place.nodes
        self._leaving: dict[tuple[int, ...], int] = defaultdict(int)
        self._pieces = self._relays = 0
        self._peers: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def traffic(self) -> Traffic:
        """Traffic of all classes added so far."""
        plan, ranks = self._plan, self._ranks
        return Traffic(
            plan.place,
            direct=np.array(self._direct, np.int64).reshape(plan.source.ranks, ranks),
            relayed=np.array(self._relayed, np.int64).reshape(ranks, ranks),
            needed=np.tile(np.array(self._needed, np.int64), plan.replicas),
            staged=np.tile(np.array(self._staged, np.int64), plan.replicas),
            entering=np.array(self._entering, np.int64),
            leaving=dict(self._leaving),
            pieces=self._pieces,
            relays=self._relays,
        )

    def add(self, tensors: TensorClass) -> None:
        rotations = [self._plan.rotations[name] for name in tensors.names]
        for box, workers in tensors.wanted.items():
            pieces = regions(box, tensors.held.items())
            # Peers and owners share a region at whole blocks, so the regions alone tell which blocks are split.
            staged = tensors.format.staged(box, (region.box for region in pieces)) * len(rotations)
            for worker, placements in workers.items():
                self._staged[worker] += staged * placements
            for number in range(max(workers.values())):
                wanting = tuple(worker for worker, placements in workers.items() if placements > number)
                for worker in wanting:
                    self._needed[worker] += tensors.format.held(box) * len(rotations)
                for region in pieces:
                    if not region.owners:
                        raise ValueError(f"no source rank holds {region.box} of {tensors.names[0]}")
                    for peers in self._peers_of(wanting):
                        self._deliver(tensors.format, rotations, region, peers)
        for present, nodes in self._nodes_by_workers.items():
            for box in _disjoint([box for box, wanting in tensors.wanted.items() if not present.isdisjoint(wanting)]):
                for region in regions(box, tensors.held.items()):
                    self._bound(region, nodes, tensors.format.least(region.box) * len(rotations))

    def _peers_of(self, workers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The groups of destination ranks that receive together what `workers` of every replica want."""
        if workers not in self._peers:
            choice, size = self._plan.sender_choice, self._plan.destination.ranks
            ranks = [replica * size + worker for replica in range(self._plan.replicas) for worker in workers]
            self._peers[workers] = list(dict.fromkeys(choice.node_peers(rank, workers) for rank in ranks))
        return self._peers[workers]

    @cached_property
    def _nodes_by_workers(self) -> Mapping[frozenset[int], list[int]]:
        """The nodes with ranks of the same workers."""
        workers: dict[int, set[int]] = defaultdict(set)
        for rank, node in enumerate(self._plan.place.destination_node):
            workers[node].add(rank % self._plan.destination.ranks)
        nodes: dict[frozenset[int], list[int]] = defaultdict(list)
        for node, on_node in workers.items():
            nodes[frozenset(on_node)].append(node)
        return nodes

    def _deliver(
        self, tensor_format: TensorFormat, rotations: Sequence[int], region: Region, peers: tuple[int, ...]
    ) -> None:
        """Count the deliveries of `region` of every tensor of a class to `peers`."""
        choice, ranks = self._plan.sender_choice, self._ranks
        # Rotations matter only modulo the numbers of ranks that take turns.
        period = lcm(len(peers), *(len(choice.nearest(region.owners, rank)) for rank in peers))
        repeated = Counter(rotation % period for rotation in rotations) if period > 1 else {0: len(rotations)}
        for rotation, tensors in repeated.items():
            for delivery in choice.deliveries(rotation, region, peers):
                size = tensor_format.travelling(delivery.box) * tensors
                self._direct[delivery.sender * ranks + delivery.receiver] += size
                self._pieces += tensors
                self._relays += tensors * len(delivery.relayed_to)
                for other in delivery.relayed_to:
                    self._relayed[delivery.receiver * ranks + other] += size

    def _bound(self, region: Region, nodes: Sequence[int], size: int) -> None:
        """Count `region`, of `size` bytes, which each of `nodes` needs at least once."""
        for node in nodes:
            if all(self._plan.place.source_node[owner] != node for owner in region.owners):
                self._entering[node] += size
                self._leaving[region.owners] += size


def _disjoint(boxes: Sequence[Box]) -> Collection[Box]:
    """The elements of `boxes`, each in one box."""
    if not first_overlap(boxes):
        return boxes
    union: list[Box] = []
    for box in boxes:
        left = [box]
        for other in union:
            left = [rest for piece in left for rest in piece.without(other)]
        union.extend(left)
    return union
