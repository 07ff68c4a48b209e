"""The messages of a refit: the traffic between ranks, cut into buckets, and the ports that each message uses."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from converters.cost import Rates, Traffic
from converters.topology import Topology
from megarl.resharding.direct.schedule import sending_order

RELAYS = 16
"""Assumption of the replay: a destination relays to another one in at least this many parts, spread over the time in
which the bytes arrive. The runtime cuts relays into messages by size only.
"""

Integers = NDArray[np.int64]


class Path(IntEnum):
    """Path between two ranks: the memory of the GPU that both use, NVLink inside a node, or the network."""

    MEMORY = 0
    NVLINK = 1
    NIC = 2


@dataclass(frozen=True)
class Messages:
    """Columns of a table of messages, each int64 [messages], sorted by sender and then by sending order."""

    sender: Integers
    receiver: Integers
    nbytes: Integers
    part: Integers
    """Index of a message among those of its pair of sender and receiver."""
    parts: Integers
    """Number of messages of its pair."""


def direct_messages(direct: Integers, bucket_bytes: int) -> Messages:
    """Messages of sources: the bytes of each pair in as few equal messages of at most `bucket_bytes` as possible."""
    messages = _cut(direct, -(-direct // bucket_bytes))
    sources, destinations = direct.shape
    bounds = np.searchsorted(messages.sender, np.arange(sources + 1))
    order = np.empty(len(messages.sender), np.int64)
    for source in range(sources):
        own = slice(bounds[source], bounds[source + 1])
        order[own] = bounds[source] + sending_order(
            source, sources, destinations, messages.receiver[own], messages.part[own], messages.nbytes[own]
        )
    return _take(messages, order)


def relayed_messages(relayed: Integers, bucket_bytes: int) -> Messages:
    """Messages that destinations relay, ordered by part, each first to the next rank and then on around the node."""
    parts = np.maximum(-(-relayed // bucket_bytes), np.minimum(relayed, RELAYS))
    messages = _cut(relayed, parts)
    distance = (messages.receiver - messages.sender) % max(1, len(relayed))
    return _take(messages, np.lexsort((distance, messages.part, messages.sender)))


def _cut(nbytes: Integers, parts: Integers) -> Messages:
    """The messages of all pairs, ordered by sender, receiver and part; sizes of a pair differ by at most one byte."""
    senders, receivers = np.nonzero(nbytes)
    total, number = nbytes[senders, receivers], parts[senders, receivers]
    part = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    total_of, parts_of = np.repeat(total, number), np.repeat(number, number)
    # Quotient and remainder separately, because bytes x parts may overflow 64 bits.
    size = total_of // parts_of + (part < total_of % parts_of)
    return Messages(np.repeat(senders, number), np.repeat(receivers, number), size, part, parts_of)


def _take(messages: Messages, order: Integers) -> Messages:
    return Messages(**{name: values[order] for name, values in vars(messages).items()})


@dataclass(frozen=True)
class Routes:
    """The ports that messages use, and how long they keep them busy, each int64 [messages].

    Ports have a direction: `out_port` is 3 x GPU + path, and `in_port` is numbered likewise among the ports into GPUs.
    """

    out_port: Integers
    in_port: Integers
    nanoseconds: Integers

    @classmethod
    def of(cls, messages: Messages, topology: Topology, rates: Rates, *, relayed: bool) -> "Routes":
        """The routes of messages from source ranks, or from destination ranks if they are `relayed`."""
        side = "destination" if relayed else "source"
        sender_gpu, sender_node = (
            np.asarray(getattr(topology, f"{side}_{x}"))[messages.sender] for x in ("gpu", "node")
        )
        gpu = np.asarray(topology.destination_gpu)[messages.receiver]
        node = np.asarray(topology.destination_node)[messages.receiver]
        path = np.where(sender_node == node, int(Path.NVLINK), int(Path.NIC))
        path[sender_gpu == gpu] = Path.MEMORY
        rate = np.array([np.inf, rates.nvlink_bytes_per_s_per_gpu, rates.nic_bytes_per_s_per_gpu])[path]
        return cls(len(Path) * sender_gpu + path, len(Path) * gpu + path, nanoseconds(messages.nbytes, rate))


def nanoseconds(nbytes: Integers, bytes_per_s: float | NDArray[np.float64]) -> Integers:
    """The time for `nbytes`, rounded up."""
    return np.ceil(nbytes / bytes_per_s * 1e9).astype(np.int64)


def traffic_messages(traffic: Traffic, bucket_bytes: int) -> tuple[Messages, Messages]:
    """The messages that sources send, and those that destinations relay."""
    return direct_messages(traffic.direct, bucket_bytes), relayed_messages(traffic.relayed, bucket_bytes)
