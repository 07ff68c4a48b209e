"""The streams of a rank: its part of a plan, as the messages between it and each of its peers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from converters.plan import Plan, Transfer
from megarl.resharding.direct.messages import Message, cut_into_messages

DTypes = Mapping[str, torch.dtype]
"""Type of each tensor of a destination rank, by its name there."""
Streams = Mapping[int, Sequence[Message]]
"""The messages with each peer, by its rank."""


@dataclass(frozen=True)
class DestinationStreams:
    """The streams of a destination rank."""

    direct: Streams
    """By source rank: what that sends to it."""
    relays_in: Streams
    """By destination rank: what that neighbour passes on to it."""
    relays_out: Streams
    """By destination rank: what it passes on to that neighbour, of that which comes directly."""


def outgoing(plan: Plan, source_rank: int, dtypes: Sequence[DTypes], bucket_bytes: int) -> Streams:
    """Streams of a source rank, by destination rank; `dtypes` are those of each worker of a replica.

    Raises as `Plan.transfers_from` and `cut_into_messages`.
    """
    by_destination = _sorted((transfer.destination_rank, transfer) for transfer in plan.transfers_from(source_rank))
    return _messages(by_destination, lambda destination: dtypes[destination % len(dtypes)], bucket_bytes)


def incoming(plan: Plan, destination_rank: int, dtypes: Sequence[DTypes], bucket_bytes: int) -> DestinationStreams:
    """Streams that a destination rank gets and passes on: the same messages as its peers have; arguments as `outgoing`.

    Raises as `Plan.destination_part` and `cut_into_messages`.
    """
    part = plan.destination_part(destination_rank)
    # Neighbours may have their tensors in another order; both ends have to find the same one.
    place = {name: number for number, name in enumerate(plan.source.hf_shapes)}

    def in_order(relays: Iterable[Transfer]) -> list[Transfer]:
        return sorted(relays, key=lambda each: (place[each.hf_name], each.destination_name, each.destination_box.start))

    def dtypes_of(destination: int) -> DTypes:
        return dtypes[destination % len(dtypes)]

    own = dtypes_of(destination_rank)
    direct = _sorted((transfer.source_rank, transfer) for transfer in part.transfers)
    relays_in = _sorted((relay.source_rank, relay) for relay in in_order(part.relays_in))
    relays_out = _sorted((relay.destination_rank, relay) for relay in in_order(part.relays_out))
    return DestinationStreams(
        _messages(direct, lambda _: own, bucket_bytes),
        _messages(relays_in, lambda _: own, bucket_bytes),
        _messages(relays_out, dtypes_of, bucket_bytes),
    )


def _messages(
    transfers_of: Mapping[int, Sequence[Transfer]], dtypes_of: Callable[[int], DTypes], bucket_bytes: int
) -> Streams:
    return {
        peer: cut_into_messages(transfers, dtypes_of(peer), bucket_bytes) for peer, transfers in transfers_of.items()
    }


def _sorted(transfers: Iterable[tuple[int, Transfer]]) -> dict[int, list[Transfer]]:
    found: dict[int, list[Transfer]] = defaultdict(list)
    for peer, transfer in transfers:
        found[peer].append(transfer)
    return found
