"""The sending side: packs a rank's messages into two buckets in turn and announces each to its destination."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from selectors import BaseSelector

import numpy as np
import torch
from torch import Tensor

from converters.number_formats import NumberFormat
from megarl.process.profiler import named
from megarl.resharding.direct.changes import SentMessages
from megarl.resharding.direct.connections import (
    Address,
    Link,
    TransferError,
    as_they_come,
    listening,
    notify_failure,
    notify_peers_on_error,
    ready,
)
from megarl.resharding.direct.handshake import Listener
from megarl.resharding.direct.messages import Message, digest
from megarl.resharding.direct.messages_by_peer import MessageId, MessagesByPeer, largest_bytes
from megarl.resharding.direct.packing import addresses, blocks, pack
from megarl.resharding.direct.schedule import sending_order
from megarl.resharding.direct.transports import transport_of
from megarl.resharding.direct.transports.endpoint import BUCKETS, Rendezvous, SendEndpoint
from megarl.resharding.direct.wire import Acknowledgement, Announcement, Connected, Hello
from megarl.resharding.direct.zero_copy import shared_tensors
from megarl.resharding.kernels import Block
from megarl.resharding.kernels.first_launch import launch_gather
from megarl.resharding.transfer_stats import TransferStats
from megatron_ext import device


@dataclass(frozen=True)
class _InFlight:
    link: Link
    message: MessageId
    version: int


class Sender:
    """Sends for rank `rank` in every refit: `messages` says what goes from its `tensors` to whom.

    `connect` waits for the receivers. After any method fails, only `disconnect` and `close` may be called.
    """

    def __init__(self, rank: int, messages: MessagesByPeer, tensors: Mapping[str, Tensor], host: str) -> None:
        self._rank = rank
        self._messages = messages
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._listener = Listener(host)
        self._links: dict[int, Link] = {}
        self._endpoint: SendEndpoint | None = None
        self._name = ""
        self._timeout_s = 0.0
        self._with_checksum = True
        self._order: list[MessageId] = []
        self._views: dict[tuple[MessageId, int, bool], list[Block]] = {}
        """Views of a message in one bucket, with or without its zero-copy pieces, built when first needed."""
        self._addresses: list[int] = []
        """Addresses of the tensors when the views were built."""
        self._shared: dict[str, int] = {}
        """Addresses of the tensors that receivers may read in place."""
        self._zero_copy: dict[int, Mapping[int, tuple[int, ...]]] = {}
        """Destination rank -> message number -> numbers of the pieces that it reads in place."""
        self._in_flight: list[_InFlight | None] = [None] * BUCKETS
        """The message in each bucket, until its peer has acknowledged it."""
        self._sent: SentMessages | None = None
        self._stream = device.SideStream()

    @property
    def address(self) -> Address:
        """The address at which receivers find this rank."""
        return self._listener.address

    def connect(self, rendezvous: Rendezvous) -> None:
        """Wait for all receivers and exchange offers. Raises TransferError if one does not come."""
        self._timeout_s, self._with_checksum = rendezvous.timeout_s, rendezvous.with_checksum
        self._sent = SentMessages() if rendezvous.with_changes else None
        self._name = f"{rendezvous.senders} {self._rank}"
        with notify_peers_on_error(self._links):
            try:
                for _ in self._messages:
                    self._welcome(*self._listener.accept(rendezvous.key, rendezvous.timeout_s))
            finally:
                # After an error, receivers still waiting at the listener see it close.
                self._listener.close()
            largest = largest_bytes(self._messages)
            self._endpoint = transport_of(rendezvous).send_endpoint(rendezvous, self._rank, largest)
            shared = shared_tensors(self._messages, self._tensors)
            self._endpoint.share(shared)
            self._shared = {name: tensor.data_ptr() for name, tensor in shared.items()}
            for destination, link in self._links.items():
                link.send(self._endpoint.offer(destination))
            destination_of = {link: destination for destination, link in self._links.items()}
            for link, connected in as_they_come(destination_of, Connected, rendezvous.timeout_s):
                self._zero_copy[destination_of[link]] = connected.zero_copy
            self._endpoint.all_connected()
        self._order = self._in_order(len(rendezvous.listeners), rendezvous.destinations)

    def load_kernels(self) -> None:
        """Launch the packing kernels once, after `connect`, while no other thread launches any."""
        formats = {self._quantised(message) for messages in self._messages.values() for message in messages}
        for each in formats:
            launch_gather(each, with_checksum=self._with_checksum)

    def send(self, version: int) -> TransferStats:
        """Send the current weights as `version`; return how much was sent, once all receivers have them.

        With `Rendezvous.with_changes`, a message travels as its changes since the last version sent over this
        connection, if there is one and the changes are smaller. Its checksum is still that of the whole message. A
        receiver that holds another version, or other weights, is sent the whole message. Raises TransferError if a
        receiver is gone, silent or failed.
        """
        # Let all work queued on the device finish writing the tensors; later waits are for this transfer's stream
        # alone.
        device.synchronize()
        return self.send_as_ready(version, iter)

    def send_as_ready(self, version: int, ready: Callable[[Iterable[MessageId]], Iterator[MessageId]]) -> TransferStats:
        """Send all messages in the order in which `ready` yields them; receivers are told of any error that it raises.

        `ready` gets all messages in this rank's sending order.
        """
        moved = TransferStats()
        if self._addresses != (now := addresses(self._tensors)):
            self._views, self._addresses = {}, now
        # No zero copy when sending changes, which are made of whole messages, or if a shared tensor has moved:
        # receivers would read its old address.
        skips = self._sent is None and all(self._tensors[name].data_ptr() == at for name, at in self._shared.items())
        links = self._links.values()
        with notify_peers_on_error(self._links), self._stream.entered(), listening(links) as selector:
            for position, message in enumerate(ready(self._order)):
                with named("send a message"):
                    moved += self._send(message, version, position % BUCKETS, skips=skips)
                # Wait before asking `ready` for the next message, so that it is chosen as late as possible.
                moved += self._wait_for_bucket(selector, (position + 1) % BUCKETS)
            for bucket in range(BUCKETS):
                moved += self._wait_for_bucket(selector, bucket)
        return moved

    def abort(self, reason: str) -> None:
        """Abort a method running in another thread: peers are told the reason, so neither side waits for the other."""
        # `connect` may be waiting for peers that have not come yet.
        self._listener.abort(reason)
        notify_failure(self._links, reason)

    def disconnect(self) -> None:
        """Close the links. The buckets stay until `close`, as receivers may still map them."""
        self._listener.close()
        for link in self._links.values():
            link.close()

    def close(self) -> None:
        """Close the links and free the buckets; every live receiver must have unmapped them before."""
        self.disconnect()
        self._views, self._sent = {}, None
        if self._endpoint is not None:
            self._endpoint.close()

    def _welcome(self, link: Link, hello: Hello) -> None:
        link.peer = f"engine worker {hello.destination}"
        if hello.destination not in self._messages or hello.destination in self._links:
            raise TransferError(f"{self._name} has nothing for {link.peer}")
        self._links[hello.destination] = link
        if hello.digest != digest(self._messages[hello.destination]):
            raise TransferError(f"{self._name} and {link.peer} do not have the same plan")

    def _quantised(self, message: Message) -> tuple[NumberFormat, torch.dtype] | None:
        """The number format to which a message is quantised, and the dtype of its values; None if it is not."""
        return next(
            (
                (piece.scales.number_format, self._tensors[piece.source_name].dtype)
                for piece in message.pieces
                if piece.scales is not None
            ),
            None,
        )

    def _in_order(self, sources: int, destinations: int) -> list[MessageId]:
        messages = {
            (destination, number): message
            for destination, messages in self._messages.items()
            for number, message in enumerate(messages)
        }
        keys = list(messages)
        table = [(*key, message.size_bytes) for key, message in messages.items()]
        columns = np.array(table, np.int64).reshape(-1, 3).T
        order = sending_order(self._rank, sources, destinations, *columns)
        return [keys[index] for index in order]

    def _send(self, chosen: MessageId, version: int, bucket: int, *, skips: bool) -> TransferStats:
        assert self._endpoint is not None
        destination, number = chosen
        message = self._messages[destination][number]
        memory = self._endpoint.buckets[bucket][: message.size_bytes]
        zero_copy = self._zero_copy.get(destination, {}).get(number, ()) if skips else ()
        key = chosen, bucket, bool(zero_copy)
        if key not in self._views:
            self._views[key] = blocks(message, self._endpoint.buckets[bucket], self._tensors, "source", zero_copy)
        if self._sent is not None:
            # Padding between pieces must be the same bytes at both ends.
            memory.zero_()
        checksum = pack(self._views[key], with_checksum=self._with_checksum)
        moved, since = TransferStats(message.size_bytes), None
        if self._sent is not None:
            moved, since = self._sent.replace(chosen, version, memory)
        self._stream.synchronize()
        self._endpoint.push(bucket, moved.size_bytes, destination)
        link = self._links[destination]
        self._in_flight[bucket] = _InFlight(link, chosen, version)
        link.send(Announcement(version, number, bucket, moved.size_bytes, checksum, since, bool(zero_copy)))
        return moved

    def _wait_for_bucket(self, selector: BaseSelector, bucket: int) -> TransferStats:
        """Wait until a bucket is free. Returns how much was sent meanwhile, in messages that had to be resent whole."""
        moved = TransferStats()
        while self._in_flight[bucket]:
            reading = {each.link for each in self._in_flight if each}
            # Links that are not waited for are ready only if their peer has failed.
            for link in ready(selector, reading, self._timeout_s):
                acknowledgement = link.receive(Acknowledgement)
                sent, self._in_flight[acknowledgement.bucket] = self._in_flight[acknowledgement.bucket], None
                if acknowledgement.resend_whole:
                    assert sent is not None
                    assert self._sent is not None
                    self._sent.forget(sent.message)
                    moved += self._send(sent.message, sent.version, acknowledgement.bucket, skips=False)
        return moved
