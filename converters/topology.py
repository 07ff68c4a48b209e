"""Topologies: on which node and GPU every rank of a source and of a destination runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from converters.errors import UserError


@dataclass(frozen=True)
class Topology:
    """The node and GPU of every source rank and destination rank, both numbered over the whole cluster.

    Ranks on the same GPU share its memory, those on the same node communicate over NVLink, all others through the NICs
    of their GPUs. Raises UserError if a GPU would be on two nodes.
    """

    source_node: Sequence[int]
    source_gpu: Sequence[int]
    destination_node: Sequence[int]
    destination_gpu: Sequence[int]

    def __post_init__(self) -> None:
        node_of: dict[int, int] = {}
        for side in ("source", "destination"):
            nodes, gpus = getattr(self, f"{side}_node"), getattr(self, f"{side}_gpu")
            if len(nodes) != len(gpus):
                raise UserError(
                    f"the topology gives {len(nodes)} {side} ranks a node and {len(gpus)} a GPU; give every rank both"
                )
            for rank, (node, gpu) in enumerate(zip(nodes, gpus, strict=True)):
                if min(node, gpu) < 0 or node_of.setdefault(gpu, node) != node:
                    raise UserError(
                        f"the topology has {side} rank {rank} on GPU {gpu} of node {node}, but GPU {gpu} on node"
                        f" {node_of.get(gpu)}; number nodes and GPUs from 0, each GPU on one node"
                    )

    @classmethod
    def apart(cls, source_ranks: int, destination_ranks: int) -> "Topology":
        """Every rank on a node of its own: the assumption if the topology is unknown."""
        return cls.separate(source_ranks, destination_ranks, gpus_per_node=1)

    @classmethod
    def separate(cls, source_ranks: int, destination_ranks: int, gpus_per_node: int) -> "Topology":
        """One GPU per rank, the source's nodes first; no node has ranks of both."""
        first_node = -(-source_ranks // gpus_per_node)
        first_gpu = first_node * gpus_per_node
        return cls(
            [rank // gpus_per_node for rank in range(source_ranks)],
            range(source_ranks),
            [first_node + rank // gpus_per_node for rank in range(destination_ranks)],
            range(first_gpu, first_gpu + destination_ranks),
        )

    @classmethod
    def in_a_row(cls, source_ranks: int, destination_ranks: int, gpus_per_node: int) -> "Topology":
        """One GPU per rank, the source's ranks first; a node may have ranks of both."""
        source, destination = range(source_ranks), range(source_ranks, source_ranks + destination_ranks)
        return cls(
            [gpu // gpus_per_node for gpu in source], source, [gpu // gpus_per_node for gpu in destination], destination
        )

    @classmethod
    def colocated(cls, source_ranks: int, destination_ranks: int, gpus_per_node: int) -> "Topology":
        """Source rank i and destination rank i both on GPU i."""
        source, destination = range(source_ranks), range(destination_ranks)
        return cls(
            [gpu // gpus_per_node for gpu in source], source, [gpu // gpus_per_node for gpu in destination], destination
        )

    @property
    def nodes(self) -> int:
        """Number of nodes, including nodes without ranks."""
        return 1 + max(*self.source_node, *self.destination_node)

    @property
    def gpus(self) -> int:
        """Number of GPUs, including GPUs without ranks."""
        return 1 + max(*self.source_gpu, *self.destination_gpu)

    def check(self, source_ranks: int, destination_ranks: int) -> None:
        """Raise UserError unless the topology has this many ranks on each side."""
        for side, ranks in (("source", source_ranks), ("destination", destination_ranks)):
            placed = len(getattr(self, f"{side}_gpu"))
            if placed != ranks:
                raise UserError(
                    f"the topology has a place for {placed} {side} ranks, but there are {ranks}; describe a cluster"
                    " that holds just these"
                )
