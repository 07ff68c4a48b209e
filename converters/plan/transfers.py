"""Plans: the transfers that turn one layout into another, and every rank's own part of them."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from converters.boxes import Box
from converters.gc_pause import gc_paused
from converters.layout import Layout, Placement, Shape, check_tiling
from converters.plan.owners import Owners, check_same_model, numbered, owners_by_box
from converters.plan.regions import DEFAULT_CUTTING, Cutting, regions
from converters.plan.sender_choice import Delivery, SenderChoice
from converters.topology import Topology


@dataclass(frozen=True, slots=True)
class Transfer:
    """`source_box` of a tensor of one rank is copied, element for element, into `destination_box` of another rank's.

    Example: rank 1's rows 0 to 32 of `decoder.layers.0.self_attention.linear_qkv.weight` go into rows 64 to 96 of
    worker 0's `model.layers.0.self_attn.qkv_proj.weight`; `hf_name` is `model.layers.0.self_attn.q_proj.weight`.
    """

    hf_name: str
    source_rank: int
    source_name: str
    source_box: Box
    destination_rank: int
    destination_name: str
    destination_box: Box


@dataclass(frozen=True)
class DestinationPart:
    """The transfers and relays of one destination rank, each in the order of its placements.

    Both ends of a relay are destination ranks.

    Example: a worker that shares its node with another one receives half of a replicated tensor by `transfers`, relays
    it by `relays_out`, and receives the other half by `relays_in`.
    """

    transfers: list[Transfer] = field(default_factory=list)
    """Transfers from sources to this rank."""
    relays_in: list[Transfer] = field(default_factory=list)
    """Relays from neighbours to this rank."""
    relays_out: list[Transfer] = field(default_factory=list)
    """Relays from this rank to its neighbours, of elements that it receives from sources."""


def plan(source: Layout, destination: Layout) -> list[Transfer]:
    """The transfers that write every element of `destination`, except padding, exactly once.

    Ranks that hold the same elements share the sending. Equal layouts always give the same list, ordered by destination
    rank. Raises what `Plan` and its `transfers_into` raise.
    """
    whole = Plan(source, destination)
    return [transfer for rank in range(destination.ranks) for transfer in whole.transfers_into(rank)]


@dataclass(frozen=True)
class Plan:
    """How to fill `replicas` copies of `destination` from `source`; destination rank = replica x workers + worker.

    A rank computes its own part alone, from nothing but these fields; the order of the tensors in the source's
    `hf_shapes` matters. Without a `topology`, every rank counts as on a node of its own. With `node_once`, data that
    several ranks of a node want, and no source on it holds, enters the node once: each of these ranks fetches a part
    and relays it to the others.

    Raises UserError if the layouts are not of the same model, or the topology is not of these ranks.

    Example: `Plan(megatron_layout(...), traced_layout(...), replicas=4)` fills four engines of the traced workers.
    """

    source: Layout
    destination: Layout
    replicas: int = 1
    topology: Topology | None = None
    node_once: bool = False
    cutting: Cutting = DEFAULT_CUTTING

    def __post_init__(self) -> None:
        check_same_model(self.source.hf_shapes, self.destination.hf_shapes)
        self.place.check(self.source.ranks, self.destination_ranks)

    @property
    def destination_ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.replicas * self.destination.ranks

    @cached_property
    def place(self) -> Topology:
        """The nodes and GPUs of the ranks."""
        return self.topology or Topology.apart(self.source.ranks, self.destination_ranks)

    @cached_property
    def sender_choice(self) -> SenderChoice:
        """The rule that chooses the senders."""
        return SenderChoice(self.place, self.replicas, self.destination.ranks, self.node_once, self.cutting)

    @cached_property
    def rotations(self) -> Mapping[str, int]:
        """HF name -> number of earlier tensors of the same shape."""
        seen: Counter[Shape] = Counter()
        rotations = {}
        for name, shape in self.source.hf_shapes.items():
            rotations[name] = seen[tuple(shape)]
            seen[tuple(shape)] += 1
        return rotations

    @cached_property
    def _source(self) -> Owners:
        return owners_by_box(range(self.source.ranks), self.source.placements)

    def transfers_into(self, rank: int) -> list[Transfer]:
        """Transfers from sources to destination `rank`, in the order of its placements.

        Unless the plan is `node_once`, the rank receives nothing else. Raises as `destination_part` does.
        """
        return self.destination_part(rank).transfers

    @gc_paused()
    def destination_part(self, rank: int) -> DestinationPart:
        """The part of destination `rank`: exactly one transfer or relay writes each of its elements.

        Raises ValueError if its boxes overlap or leave a gap, or if no source rank holds an element.
        """
        workers = self.destination.ranks
        shard = self.destination.shard(rank % workers)
        check_tiling(shard)
        wanted = self._wanted_near(rank, shard.placements)
        part = DestinationPart()
        for placement, number in numbered(shard.placements):
            wanting = wanted.get(placement.hf_name, {}).get(placement.hf_box, {})
            peers = self.sender_choice.node_peers(rank, _with_more(wanting, number))
            for delivery in self._deliveries(self._source, placement, peers):
                if delivery.receiver == rank:
                    part.transfers.append(_transfer(self._source, delivery, placement))
                    for other in delivery.relayed_to:
                        part.relays_out.append(_relay(delivery, placement, other, wanting[other % workers][number]))
                elif rank in delivery.relayed_to:
                    theirs = wanting[delivery.receiver % workers][number]
                    part.relays_in.append(_relay(delivery, theirs, rank, placement))
        return part

    @gc_paused()
    def transfers_from(self, rank: int) -> list[Transfer]:
        """Transfers from source `rank`, ordered by destination rank, and for each in the order of its `transfers_into`.

        Raises ValueError if a destination wants an element of this rank's tensors that no source rank holds.
        """
        names = {placement.hf_name for placement in self.source.placements(rank)}
        source = owners_by_box(range(self.source.ranks), self.source.placements_of(names))
        workers = range(self.destination.ranks)
        placements = list(map(self.destination.placements_of(names), workers))
        wanted = owners_by_box(workers, placements.__getitem__)
        # Peers ask the same of the sources, so it is computed once for all of them.
        of_peers: dict[tuple[str, Box, tuple[int, ...]], list[Delivery]] = {}

        def sent(placement: Placement, peers: tuple[int, ...]) -> list[Delivery]:
            key = placement.hf_name, placement.hf_box, peers
            if (found := of_peers.get(key)) is None:
                found = [each for each in self._deliveries(source, placement, peers) if each.sender == rank]
                if len(peers) > 1:
                    of_peers[key] = found
            return found

        return [
            _transfer(source, delivery, placement)
            for destination in range(self.destination_ranks)
            for placement, number in numbered(placements[destination % len(workers)])
            for delivery in sent(
                placement,
                self.sender_choice.node_peers(
                    destination, _with_more(wanted[placement.hf_name][placement.hf_box], number)
                ),
            )
            if delivery.receiver == destination
        ]

    def _wanted_near(self, rank: int, placements: Sequence[Placement]) -> Owners:
        """The neighbours of a destination rank that want the boxes of its `placements`; empty without neighbours."""
        neighbours = self.sender_choice.neighbours(rank)
        if len(neighbours) == 1:
            return {}
        workers = sorted({other % self.destination.ranks for other in neighbours})
        return owners_by_box(workers, self.destination.placements, boxes_of=placements)

    def _deliveries(self, source: Owners, wanted: Placement, peers: tuple[int, ...]) -> Iterator[Delivery]:
        held = source.get(wanted.hf_name, {})
        for region in regions(wanted.hf_box, held.items()):
            if not region.owners:
                raise ValueError(f"no source rank holds {region.box} of {wanted.hf_name}")
            yield from self.sender_choice.deliveries(self.rotations[wanted.hf_name], region, peers)


def _with_more(wanting: Mapping[int, Sequence[Placement]], number: int) -> Collection[int]:
    """The workers with more than `number` placements."""
    return [worker for worker, placements in wanting.items() if len(placements) > number] if number else wanting


def _transfer(source: Owners, delivery: Delivery, wanted: Placement) -> Transfer:
    held = source[wanted.hf_name]
    placement = next(
        of_box[delivery.sender][0]
        for box, of_box in held.items()
        if delivery.sender in of_box and box.intersect(delivery.box) == delivery.box
    )
    return Transfer(
        wanted.hf_name,
        delivery.sender,
        placement.local_name,
        placement.to_local(delivery.box),
        delivery.receiver,
        wanted.local_name,
        wanted.to_local(delivery.box),
    )


def _relay(delivery: Delivery, theirs: Placement, receiver: int, wanted: Placement) -> Transfer:
    return Transfer(
        wanted.hf_name,
        delivery.receiver,
        theirs.local_name,
        theirs.to_local(delivery.box),
        receiver,
        wanted.local_name,
        wanted.to_local(delivery.box),
    )
