"""The messages between a rank and each of its peers, derived from its own part of the plan."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch

from converters.plan import Plan, Transfer
from megarl.resharding.direct.messages import Message, cut_into_messages
from megarl.resharding.direct.quantised_shard import QuantisedShard
from megarl.resharding.direct.typed_transfers import TypedTransfer, plain

DTypes: TypeAlias = Mapping[str, torch.dtype]
"""Type of each tensor of a destination rank, by its name there."""
MessagesByPeer: TypeAlias = Mapping[int, Sequence[Message]]
"""The messages with each peer, by its rank."""
MessageId: TypeAlias = tuple[int, int]
"""A message: the peer's rank, and the message's number among those with this peer."""


@dataclass(frozen=True)
class DestinationMessages:
    """The messages of a destination rank.

    Example: `direct={0: [m0, m1]}, relays_in={5: [m2]}, relays_out={5: [m3]}` for rank 4, which gets two messages from
    source 0 and exchanges parts with its neighbour, rank 5.
    """

    direct: MessagesByPeer
    """Messages from each source rank, by its rank."""
    relays_in: MessagesByPeer
    """Messages that each neighbour relays to this rank, by the neighbour's rank."""
    relays_out: MessagesByPeer
    """Messages that this rank relays to each neighbour, by the neighbour's rank: a part of what it gets directly."""


@dataclass(frozen=True)
class _Workers:
    """The workers of a replica: the dtypes of their tensors, and their quantised tensors, if any."""

    dtypes: Sequence[DTypes]
    quantised: Sequence[QuantisedShard]

    def typed_transfers(self, transfer: Transfer) -> Iterable[TypedTransfer]:
        """The typed transfers of a transfer from a source."""
        worker = transfer.destination_rank % len(self.dtypes)
        if self.quantised:
            return self.quantised[worker].typed_transfers(transfer, self.dtypes[worker])
        return [plain(transfer, self.dtypes[worker])]

    def relayed(self, transfer: Transfer) -> Iterable[TypedTransfer]:
        """The typed transfers of a relay."""
        neighbour, worker = (rank % len(self.dtypes) for rank in (transfer.source_rank, transfer.destination_rank))
        if self.quantised:
            return self.quantised[worker].relayed(transfer, self.quantised[neighbour], self.dtypes[worker])
        return [plain(transfer, self.dtypes[worker])]


def outgoing(
    plan: Plan,
    source_rank: int,
    dtypes: Sequence[DTypes],
    bucket_bytes: int,
    quantised: Sequence[QuantisedShard] = (),
) -> MessagesByPeer:
    """The messages that a source rank sends, by destination rank; `dtypes` holds those of each worker of a replica.

    `quantised` describes the workers' quantised tensors, if they have any. Raises as `Plan.transfers_from` and
    `cut_into_messages`.
    """
    by_destination = _by_peer((transfer.destination_rank, transfer) for transfer in plan.transfers_from(source_rank))
    return _messages(by_destination, _Workers(dtypes, quantised).typed_transfers, bucket_bytes)


def incoming(
    plan: Plan,
    destination_rank: int,
    dtypes: Sequence[DTypes],
    bucket_bytes: int,
    quantised: Sequence[QuantisedShard] = (),
) -> DestinationMessages:
    """The messages that a destination rank receives and relays, as its peers derive them; arguments as `outgoing`.

    Raises as `Plan.destination_part` and `cut_into_messages`.
    """
    part = plan.destination_part(destination_rank)
    # Neighbours may order their tensors differently; sort so that both ends derive the same messages.
    place = {name: number for number, name in enumerate(plan.source.hf_shapes)}

    def in_order(relays: Iterable[Transfer]) -> list[Transfer]:
        return sorted(relays, key=lambda each: (place[each.hf_name], each.destination_name, each.destination_box.start))

    workers = _Workers(dtypes, quantised)
    direct = _by_peer((transfer.source_rank, transfer) for transfer in part.transfers)
    relays_in = _by_peer((relay.source_rank, relay) for relay in in_order(part.relays_in))
    relays_out = _by_peer((relay.destination_rank, relay) for relay in in_order(part.relays_out))
    return DestinationMessages(
        _messages(direct, workers.typed_transfers, bucket_bytes),
        _messages(relays_in, workers.relayed, bucket_bytes),
        _messages(relays_out, workers.relayed, bucket_bytes),
    )


def largest_bytes(messages: MessagesByPeer) -> int:
    """Size of the largest message, 0 if there is none: the bucket size that fits every message."""
    return max((message.size_bytes for with_peer in messages.values() for message in with_peer), default=0)


def _messages(
    transfers_of: Mapping[int, Sequence[Transfer]],
    typed_transfers_of: Callable[[Transfer], Iterable[TypedTransfer]],
    bucket_bytes: int,
) -> MessagesByPeer:
    return {
        peer: cut_into_messages(chain.from_iterable(map(typed_transfers_of, transfers)), bucket_bytes)
        for peer, transfers in transfers_of.items()
    }


def _by_peer(transfers: Iterable[tuple[int, Transfer]]) -> dict[int, list[Transfer]]:
    found: dict[int, list[Transfer]] = defaultdict(list)
    for peer, transfer in transfers:
        found[peer].append(transfer)
    return found
