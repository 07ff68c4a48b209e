"""The streams of a rank: its part of a plan, as the messages between it and each of its peers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from converters.plan import Plan, Transfer
from megarl.resharding.messages import Message, cut_into_messages

DTypes = Mapping[str, torch.dtype]
"""Type of each tensor of a destination rank, by its name there."""


def outgoing(plan: Plan, source_rank: int, dtypes: Sequence[DTypes], bucket_bytes: int) -> dict[int, list[Message]]:
    """What a source rank sends, by destination rank; `dtypes` are those of each worker of a replica.

    Raises what `Plan.transfers_from` and `cut_into_messages` do.
    """
    by_destination = _sorted((transfer.destination_rank, transfer) for transfer in plan.transfers_from(source_rank))
    return {
        destination: cut_into_messages(transfers, dtypes[destination % len(dtypes)], bucket_bytes)
        for destination, transfers in by_destination.items()
    }


def incoming(plan: Plan, destination_rank: int, dtypes: DTypes, bucket_bytes: int) -> dict[int, list[Message]]:
    """What a destination rank gets, by source rank: the same messages as `outgoing` of those ranks."""
    by_source = _sorted((transfer.source_rank, transfer) for transfer in plan.transfers_into(destination_rank))
    return {source: cut_into_messages(transfers, dtypes, bucket_bytes) for source, transfers in by_source.items()}


def _sorted(transfers: Iterable[tuple[int, Transfer]]) -> dict[int, list[Transfer]]:
    found: dict[int, list[Transfer]] = defaultdict(list)
    for peer, transfer in transfers:
        found[peer].append(transfer)
    return found
