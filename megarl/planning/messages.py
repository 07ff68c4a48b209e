"""The messages of a refit: what goes from rank to rank, cut into buckets, and through which ports each goes."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from converters.cost import Rates, Traffic
from converters.topology import Topology
from megarl.resharding.direct.schedule import sending_order

RELAYS = 16
"""Assumption of the replay: a destination relays to another in at least so many parts, spread over the time in which
the bytes arrive. The runtime cuts relays into messages by their size alone."""

Integers = NDArray[np.int64]


class Path(IntEnum):
    """Path between two ranks: the memory of the GPU that both are on, NVLink inside a node, or the network."""

    MEMORY = 0
    NVLINK = 1
    NIC = 2


@dataclass(frozen=True)
class Messages:
    """Columns of a table of messages, each int64 [messages], sorted by sender and then by the order of sending."""

    sender: Integers
    receiver: Integers
    nbytes: Integers
    part: Integers
    """Number of a message within its pair of sender and receiver."""
    parts: Integers
    """How many messages its pair has."""


def direct_messages(direct: Integers, bucket_bytes: int) -> Messages:
    """Messages of sources: the bytes of each pair in as few equal messages of at most `bucket_bytes` as they need."""
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
    """Messages that destinations relay, in the order of the parts, to the next rank first and so round the node."""
    parts = np.maximum(-(-relayed // bucket_bytes), np.minimum(relayed, RELAYS))
    messages = _cut(relayed, parts)
    distance = (messages.receiver - messages.sender) % max(1, len(relayed))
    return _take(messages, np.lexsort((distance, messages.part, messages.sender)))


def _cut(nbytes: Integers, parts: Integers) -> Messages:
    """The messages of all pairs, ordered by sender, receiver and part; they differ in size by at most a byte."""
    senders, receivers = np.nonzero(nbytes)
    total, number = nbytes[senders, receivers], parts[senders, receivers]
    part = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
    total_of, parts_of = np.repeat(total, number), np.repeat(number, number)
    # The quotient and the remainder apart: bytes x parts may not fit into 64 bits.
    size = total_of // parts_of + (part < total_of % parts_of)
    return Messages(np.repeat(senders, number), np.repeat(receivers, number), size, part, parts_of)


def _take(messages: Messages, order: Integers) -> Messages:
    return Messages(**{name: values[order] for name, values in vars(messages).items()})


@dataclass(frozen=True)
class Routes:
    """Through which ports messages go and how long they keep them busy, each int64 [messages].

    A port is in one direction: `out_port` is 3 x GPU + path, and `in_port` likewise among the ports into GPUs.
    """

    out_port: Integers
    in_port: Integers
    nanoseconds: Integers

    @classmethod
    def of(cls, messages: Messages, topology: Topology, rates: Rates, *, relayed: bool) -> "Routes":
        """The routes of messages from source ranks, or from destination ranks where they are `relayed`."""
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
    """The time that `nbytes` take, rounded up."""
    return np.ceil(nbytes / bytes_per_s * 1e9).astype(np.int64)


def traffic_messages(traffic: Traffic, bucket_bytes: int) -> tuple[Messages, Messages]:
    """Messages that sources send, and messages that destinations relay."""
    return direct_messages(traffic.direct, bucket_bytes), relayed_messages(traffic.relayed, bucket_bytes)
