"""The receiving side: takes a rank's messages from all sources as they come, straight into its tensors."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megarl.resharding.direct.connections import (
    Link,
    TransferError,
    as_they_come,
    connect,
    notify_failure,
    notify_peers_on_error,
    ready,
    ready_now,
)
from megarl.resharding.direct.messages import digest
from megarl.resharding.direct.messages_by_peer import MessagesByPeer, largest_bytes
from megarl.resharding.direct.packing import blocks, differing, unpack
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import RecvEndpoint, Rendezvous
from megarl.resharding.direct.wire import Acknowledgement, Announcement, Connected, Hello
from megarl.resharding.kernels import Block
from megatron_ext import device


@dataclass(frozen=True)
class _Incoming:
    source: int
    announcement: Announcement
    pull: Callable[[], Tensor]


class Receiver:
    """The part of destination rank `rank` in every refit: `messages` says what it gets from whom, into its `tensors`.

    `connect` goes to the sources; after an error of any method only `close` is left.
    """

    def __init__(
        self,
        rank: int,
        messages: MessagesByPeer,
        tensors: Mapping[str, Tensor],
        rendezvous: Rendezvous,
        taken: Callable[[int, Announcement], None] = lambda _source, _announcement: None,
    ) -> None:
        """`taken` is called with every message that was taken, and its source."""
        self._rank = rank
        self._taken = taken
        self._messages = messages
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._rendezvous = rendezvous
        self._links: dict[int, Link] = {}
        self._aborted = ""
        self._endpoint: RecvEndpoint | None = None
        self._views: dict[tuple[int, int, int], list[Block]] = {}
        self._stream = device.SideStream()

    def connect(self) -> None:
        """Connect with all sources. Raises TransferError if one does not answer or has another plan."""
        rendezvous = self._rendezvous
        with notify_peers_on_error(self._links):
            self._connect()
            if self._aborted:
                raise TransferError(self._aborted)
            largest = largest_bytes(self._messages)
            self._endpoint = TRANSPORTS[rendezvous.transport].recv_endpoint(rendezvous, self._rank, largest)
            source_of = {link: source for source, link in self._links.items()}
            for link, offer in as_they_come(source_of, object, rendezvous.timeout_s):
                self._endpoint.connect(source_of[link], offer)
            self._endpoint.all_connected()
            for link in source_of:
                link.send(Connected())

    def receive(self, version: int) -> None:
        """Write everything that the sources send as `version`; returns when all of it came, each message once.

        Raises TransferError if a source is gone, silent or failed, or if a checksum is wrong. The tensors may have been
        written in part then.
        """
        self._take_all(version, self._write)

    def compare(self, version: int, written: Collection[str] = ()) -> set[str]:
        """The names of tensors in which `receive` would change a byte; nothing is written. Raises as `receive`.

        But the tensors `written` are written, and not compared.
        """
        names: set[str] = set()
        self._take_all(version, lambda incoming: names.update(differing(self._views_of(incoming), written)))
        self._stream.synchronize()
        return names

    def abort(self, reason: str) -> None:
        """Let what another thread does here end: peers are told the reason, and do not wait nor let it wait."""
        self._aborted = reason
        # `connect` notifies over links that are made from here on.
        notify_failure(self._links, reason)

    def close(self) -> None:
        """End the links and let go of all memory."""
        for link in self._links.values():
            link.close()
        self._views = {}
        if self._endpoint is not None:
            self._endpoint.close()

    def _connect(self) -> None:
        rendezvous, errors = self._rendezvous, []
        key, timeout_s = rendezvous.key, rendezvous.timeout_s
        sources = list(self._messages)
        first = self._rank % max(1, len(sources))
        # Sources talk to one rank after the other: each rank begins with another one.
        for source in (*sources[first:], *sources[:first]):
            # Also after an error: those that wait for this rank are to be told.
            try:
                link = connect(rendezvous.listeners[source], key, f"{rendezvous.senders} {source}", timeout_s)
                self._links[source] = link
                link.send(Hello(self._rank, digest(self._messages[source])))
            except TransferError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _take_all(self, version: int, take: Callable[[_Incoming], None]) -> None:
        """Call `take` with each message of all sources, as they come."""
        assert self._endpoint is not None
        missing = {source: set(range(len(messages))) for source, messages in self._messages.items()}
        announced: deque[tuple[int, Announcement]] = deque()
        pulled: deque[_Incoming] = deque()
        with notify_peers_on_error(self._links), self._stream.entered():
            while pulled or announced or any(missing.values()):
                announced += self._announcements(missing, version, wait=not pulled and not announced)
                while announced and len(pulled) < self._endpoint.pulls_at_once:
                    source, announcement = announced.popleft()
                    pull = self._endpoint.pull(source, announcement.bucket, announcement.size_bytes)
                    pulled.append(_Incoming(source, announcement, pull))
                incoming = pulled.popleft()
                take(incoming)
                self._links[incoming.source].send(Acknowledgement(incoming.announcement.bucket))
                self._taken(incoming.source, incoming.announcement)

    def _announcements(
        self, missing: Mapping[int, set[int]], version: int, *, wait: bool
    ) -> Iterator[tuple[int, Announcement]]:
        """Yield the announcements that have come, each with its source; at least one if it may `wait`."""
        open_links = {self._links[source]: source for source, numbers in missing.items() if numbers}
        for link in ready(open_links, self._rendezvous.timeout_s) if wait else ready_now(open_links):
            source, announcement = open_links[link], link.receive(Announcement)
            number = announcement.number
            if announcement.version != version or number not in missing[source]:
                raise TransferError(
                    f"{link.peer} sent message {number} of version {announcement.version}, and version {version} lacks "
                    f"its messages {sorted(missing[source])[:3]}"
                )
            if announcement.size_bytes != self._messages[source][number].size_bytes:
                raise TransferError(f"{link.peer} sent message {number} with {announcement.size_bytes} bytes")
            missing[source].remove(number)
            yield source, announcement

    def _write(self, incoming: _Incoming) -> None:
        announcement = incoming.announcement
        found = unpack(self._views_of(incoming), with_checksum=announcement.checksum is not None)
        if found != announcement.checksum:
            raise TransferError(
                f"message {announcement.number} of {self._links[incoming.source].peer} came with checksum {found} in "
                f"the place of {announcement.checksum}"
            )
        self._stream.synchronize()

    def _views_of(self, incoming: _Incoming) -> list[Block]:
        bucket = incoming.pull()
        number = incoming.announcement.number
        key = incoming.source, number, bucket.data_ptr()
        if key not in self._views:
            message = self._messages[incoming.source][number]
            self._views[key] = blocks(message, bucket, self._tensors, "destination")
        return self._views[key]
