"""A source rank: packs its messages into two buckets in turn and announces each to its destination."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megarl.resharding.announcements import Acknowledgement, Announcement, Hello, Joined
from megarl.resharding.connections import Address, Door, Link, TransferError, ready, telling
from megarl.resharding.messages import Message, digest
from megarl.resharding.packing import Block, blocks, pack
from megarl.resharding.schedule import sending_order
from megarl.resharding.transports import TRANSPORTS
from megarl.resharding.transports.ends import BUCKETS, Meeting, SendingEnd
from megatron_ext import device


@dataclass
class _Outgoing:
    """Message `number` to `destination`; its `packed` views are made when it is first sent."""

    destination: int
    number: int
    message: Message
    packed: list[Block] = field(default_factory=list)


class Sender:
    """The part of source rank `rank` in every refit: `streams` says what it sends to whom, out of its `tensors`.

    It meets its receivers in `join`; after an error of any method only `close` is left.
    """

    def __init__(
        self, rank: int, streams: Mapping[int, Sequence[Message]], tensors: Mapping[str, Tensor], host: str
    ) -> None:
        self._rank = rank
        self._streams = streams
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._door = Door(host)
        self._links: dict[int, Link] = {}
        self._end: SendingEnd | None = None
        self._timeout_s = 0.0
        self._outgoing: list[_Outgoing] = []
        self._readers: list[Link | None] = [None] * BUCKETS
        """Of each bucket, who has not acknowledged it yet."""

    @property
    def address(self) -> Address:
        """Where receivers find this rank."""
        return self._door.address

    def join(self, meeting: Meeting) -> None:
        """Wait for all receivers and let them take part. Raises TransferError if one does not come."""
        self._timeout_s = meeting.timeout_s
        with telling(self._links):
            try:
                for _ in self._streams:
                    self._welcome(self._door.accept(meeting.key, meeting.timeout_s, self._links.values()))
            finally:
                # After an error, those that stand before the door are to know.
                self._door.close()
            largest = max((message.size_bytes for stream in self._streams.values() for message in stream), default=0)
            self._end = TRANSPORTS[meeting.transport].sending(meeting, self._rank, largest)
            for link in self._links.values():
                link.send(self._end.offer())
            for link in self._links.values():
                link.receive(Joined)
            self._end.everyone_joined()
        self._outgoing = self._in_order(len(meeting.doors), meeting.destinations)

    def send(self, version: int, *, with_checksum: bool) -> int:
        """Send everything, as it is now, as `version`; returns when all receivers have it. The number of bytes sent.

        Raises TransferError if one of them is gone, silent or failed.
        """
        with telling(self._links):
            for position, outgoing in enumerate(self._outgoing):
                bucket = position % BUCKETS
                self._wait_for_bucket(bucket)
                self._send(outgoing, version, bucket, with_checksum)
            for bucket in range(BUCKETS):
                self._wait_for_bucket(bucket)
        return sum(outgoing.message.size_bytes for outgoing in self._outgoing)

    def close(self) -> None:
        """End the links and free the buckets."""
        self._door.close()
        for link in self._links.values():
            link.close()
        self._outgoing = []
        if self._end is not None:
            self._end.close()

    def _welcome(self, link: Link) -> None:
        hello = link.receive(Hello)
        link.peer = f"engine worker {hello.destination}"
        if hello.destination not in self._streams or hello.destination in self._links:
            raise TransferError(f"trainer rank {self._rank} has nothing for {link.peer}")
        self._links[hello.destination] = link
        if hello.digest != digest(self._streams[hello.destination]):
            raise TransferError(f"trainer rank {self._rank} and {link.peer} do not have the same plan")

    def _in_order(self, sources: int, destinations: int) -> list[_Outgoing]:
        outgoing = [
            _Outgoing(destination, number, message)
            for destination, stream in self._streams.items()
            for number, message in enumerate(stream)
        ]
        table = [(each.destination, each.number, each.message.size_bytes) for each in outgoing]
        columns = np.array(table, np.int64).reshape(-1, 3).T
        return [outgoing[index] for index in sending_order(self._rank, sources, destinations, *columns)]

    def _send(self, outgoing: _Outgoing, version: int, bucket: int, with_checksum: bool) -> None:
        assert self._end is not None
        if not outgoing.packed:
            outgoing.packed = blocks(outgoing.message, self._end.buckets[bucket], self._tensors, "source")
        checksum = pack(outgoing.packed, with_checksum=with_checksum)
        device.synchronize()
        size = outgoing.message.size_bytes
        self._end.push(bucket, size, outgoing.destination)
        self._readers[bucket] = link = self._links[outgoing.destination]
        link.send(Announcement(version, outgoing.number, bucket, size, checksum))

    def _wait_for_bucket(self, bucket: int) -> None:
        while self._readers[bucket]:
            for link in ready({link for link in self._readers if link}, self._timeout_s):
                self._readers[link.receive(Acknowledgement).bucket] = None
