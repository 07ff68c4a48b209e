"""The receiving side: writes a rank's messages from all sources straight into its tensors, in arrival order."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from selectors import EVENT_READ, BaseSelector

from torch import Tensor

from megarl.process.profiler import named
from megarl.resharding.direct.changes import apply_changes
from megarl.resharding.direct.connections import (
    Link,
    TransferError,
    as_they_come,
    listening,
    notify_failure,
    notify_peers_on_error,
    ready,
    ready_now,
)
from megarl.resharding.direct.handshake import connect_all
from megarl.resharding.direct.messages import digest
from megarl.resharding.direct.messages_by_peer import MessageId, MessagesByPeer, largest_bytes
from megarl.resharding.direct.packing import addresses, blocks, differing, pack, unpack
from megarl.resharding.direct.transports import transport_of
from megarl.resharding.direct.transports.endpoint import RecvEndpoint, Rendezvous, ZeroCopyPiece, own_memory
from megarl.resharding.direct.wire import Acknowledgement, Announcement, Connected, Hello
from megarl.resharding.direct.zero_copy import zero_copy_pieces
from megarl.resharding.kernels import Block
from megarl.resharding.kernels.first_launch import launch_gather, launch_scatter
from megatron_ext import device
from megatron_ext.cuda_memory import OwnMemory


@dataclass(frozen=True)
class _Incoming:
    source: int
    announcement: Announcement
    pull: Callable[[], Tensor]
    in_bucket: bool
    """Whether the pieces that could skip the bucket are in it, too."""


class Receiver:
    """Receives for destination rank `rank` in every refit: `messages` says what comes from whom into its `tensors`.

    `connect` connects to the sources. After any method fails, only `close` may be called.
    """

    def __init__(
        self,
        rank: int,
        messages: MessagesByPeer,
        tensors: Mapping[str, Tensor],
        rendezvous: Rendezvous,
        on_taken: Callable[[int, Announcement], None] = lambda _source, _announcement: None,
    ) -> None:
        """`on_taken` is called with the source and announcement of every message that was written."""
        self._rank = rank
        self._on_taken = on_taken
        self._messages = messages
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._rendezvous = rendezvous
        self._links: dict[int, Link] = {}
        self._aborted = ""
        self._endpoint: RecvEndpoint | None = None
        self._views: dict[tuple[int, int, int, bool, bool], list[Block]] = {}
        self._addresses: list[int] = []
        """Addresses of the tensors when the views were built."""
        self._zero_copy: dict[int, dict[int, dict[int, ZeroCopyPiece]]] = {}
        """Source rank -> message number -> piece number -> the piece, of those that can skip the buckets."""
        self._held: dict[MessageId, int] = {}
        """The version of each message that is in the tensors, as this connection has written it or found it there."""
        self._whole: OwnMemory | None = None
        """Memory in which a message that comes as changes is reassembled."""
        self._stream = device.SideStream()

    def connect(self) -> None:
        """Connect to all sources. Raises TransferError if one does not answer or has another plan."""
        rendezvous = self._rendezvous
        with notify_peers_on_error(self._links):
            self._connect()
            if self._aborted:
                raise TransferError(self._aborted)
            largest = largest_bytes(self._messages)
            if rendezvous.with_changes and largest:
                # Allocated now, when a failure can still be reported cleanly: a serving engine takes more GPU memory.
                self._whole = own_memory(largest)
            self._endpoint = transport_of(rendezvous).recv_endpoint(rendezvous, self._rank, largest, self._check_on_all)
            source_of = {link: source for source, link in self._links.items()}
            for link, offer in as_they_come(source_of, object, rendezvous.timeout_s):
                self._endpoint.connect(source_of[link], offer)
            self._endpoint.all_connected()
            for source, messages in self._messages.items():
                self._zero_copy[source] = zero_copy_pieces(messages, self._endpoint.readable(source), self._tensors)
            pieces = (piece for of in self._zero_copy.values() for each in of.values() for piece in each.values())
            self._endpoint.take_into([piece.into for piece in pieces if piece.into is not None])
            for link, source in source_of.items():
                link.send(Connected({number: tuple(each) for number, each in self._zero_copy[source].items()}))

    def load_kernels(self) -> None:
        """Launch the unpacking kernels once, after `connect`, while no other thread launches any."""
        if any(self._messages.values()):
            launch_scatter(with_checksum=self._rendezvous.with_checksum)
            if self._rendezvous.with_changes:
                # See `_become_whole`.
                launch_gather(None, with_checksum=False)

    def receive(self, version: int) -> None:
        """Write everything that the sources send as `version`; returns when each message has come once.

        Raises TransferError if a source is gone, silent or failed, or if a checksum is wrong; the tensors may then be
        partly written.
        """
        self._take_all(version, self._write, in_place=True)

    def compare(self, version: int, written: Collection[str] = ()) -> set[str]:
        """The names of tensors in which `receive` would change a byte; nothing is written. Raises as `receive`.

        The tensors in `written` are the exception: they are written, not compared.
        """
        names: set[str] = set()

        def take(incoming: _Incoming) -> bool:
            if incoming.announcement.changes_since is not None:
                raise TransferError("weights are compared whole, and changes came")
            found = set(differing(self._views_of(incoming), written))
            names.update(found)
            # The sender reuses the bucket as soon as this message is acknowledged.
            self._stream.synchronize()
            if not found:
                self._note(incoming)
            return True

        self._take_all(version, take, in_place=False)
        return names

    def abort(self, reason: str) -> None:
        """Abort a method running in another thread: peers are told the reason, so neither side waits for the other."""
        self._aborted = reason
        # For links made from here on, `connect` raises and notifies.
        notify_failure(self._links, reason)

    def close(self) -> Sequence[RecvEndpoint]:
        """Close the links and free all memory, except that of a returned endpoint; see `RecvEndpoint.close`."""
        for link in self._links.values():
            link.close()
        self._views, self._held = {}, {}
        if self._whole is not None:
            self._whole.close()
            self._whole = None
        endpoint, self._endpoint = self._endpoint, None
        return () if endpoint is None else endpoint.close()

    def _check_on_all(self) -> None:
        """Raise TransferError after `abort`, or if a source is gone or failed."""
        if self._aborted:
            raise TransferError(self._aborted)
        for link in self._links.values():
            link.check()

    def _connect(self) -> None:
        rendezvous, reasons = self._rendezvous, []
        source_of = {f"{rendezvous.senders} {source}": source for source in self._messages}
        listeners = {peer: rendezvous.listeners[source] for peer, source in source_of.items()}
        # Go on after an error: the remaining sources wait for this rank and must be told.
        for found in connect_all(listeners, rendezvous.key, rendezvous.timeout_s):
            if isinstance(found, TransferError):
                reasons.append(str(found))
                continue
            self._links[source_of[found.peer]] = found
            try:
                found.send(Hello(self._rank, digest(self._messages[source_of[found.peer]])))
            except TransferError as error:
                reasons.append(str(error))
        if reasons:
            raise TransferError(reasons[0])

    def _take_all(self, version: int, take: Callable[[_Incoming], bool], *, in_place: bool) -> None:
        """Call `take` with each message in arrival order; a message that it rejects is sent again, whole.

        With `in_place`, zero-copy pieces are read straight into their tensors; without, the whole message is in the
        bucket.
        """
        assert self._endpoint is not None
        if self._addresses != (now := addresses(self._tensors)):
            self._views, self._addresses = {}, now
        missing = {
            self._links[source]: (source, set(range(len(messages))))
            for source, messages in self._messages.items()
            if messages
        }
        announced: deque[tuple[int, Announcement]] = deque()
        pulled: deque[_Incoming] = deque()
        with notify_peers_on_error(self._links), self._stream.entered(), listening(missing) as selector:
            while pulled or announced or missing:
                announced += self._announcements(selector, missing, version, wait=not pulled and not announced)
                while announced and len(pulled) < self._endpoint.pulls_at_once:
                    source, announcement = announced.popleft()
                    zero_copy = self._zero_copy_of(source, announcement, in_place=in_place)
                    pull = self._endpoint.pull(source, announcement.bucket, announcement.size_bytes, zero_copy)
                    pulled.append(_Incoming(source, announcement, pull, all(each.into is None for each in zero_copy)))
                incoming = pulled.popleft()
                link, announcement = self._links[incoming.source], incoming.announcement
                is_taken = take(incoming)
                link.send(Acknowledgement(announcement.bucket, resend_whole=not is_taken))
                if is_taken:
                    self._on_taken(incoming.source, announcement)
                elif link in missing:
                    missing[link][1].add(announcement.number)
                else:
                    missing[link] = incoming.source, {announcement.number}
                    selector.register(link, EVENT_READ)

    def _announcements(
        self, selector: BaseSelector, missing: dict[Link, tuple[int, set[int]]], version: int, *, wait: bool
    ) -> Iterator[tuple[int, Announcement]]:
        """Yield the announcements that have arrived, each with its source; at least one with `wait`.

        `missing` maps each link to its source and the numbers of messages still to come. A link that has none left is
        removed from `missing` and from the selector.
        """
        timeout_s = self._rendezvous.timeout_s
        for link in ready(selector, missing, timeout_s) if wait else ready_now(selector, missing):
            (source, numbers), announcement = missing[link], link.receive(Announcement)
            number = announcement.number
            if announcement.version != version or number not in numbers:
                raise TransferError(
                    f"{link.peer} sent message {number} of version {announcement.version}, and version {version} lacks "
                    f"its messages {sorted(numbers)[:3]}"
                )
            self._check(link.peer, source, announcement)
            numbers.remove(number)
            if not numbers:
                del missing[link]
                selector.unregister(link)
            yield source, announcement

    def _check(self, peer: str, source: int, announcement: Announcement) -> None:
        number, since, size = announcement.number, announcement.changes_since, announcement.size_bytes
        whole = self._messages[source][number].size_bytes
        if size != whole if since is None else size >= whole:
            raise TransferError(f"{peer} sent message {number} with {size} bytes")

    def _zero_copy_of(self, source: int, announcement: Announcement, *, in_place: bool) -> list[ZeroCopyPiece]:
        found = self._zero_copy[source].get(announcement.number, {}).values() if announcement.zero_copy else ()
        # Weights freed for a sleep may have been reallocated elsewhere, in memory that is not registered.
        if in_place and all(each.into is not None and each.into.data_ptr() == each.into_address for each in found):
            return list(found)
        return [replace(each, into=None) for each in found]

    def _note(self, incoming: _Incoming) -> None:
        announcement = incoming.announcement
        self._held[incoming.source, announcement.number] = announcement.version

    def _write(self, incoming: _Incoming) -> bool:
        """Write a message into the tensors. Returns False if they do not hold what its changes apply to."""
        announcement = incoming.announcement
        since = announcement.changes_since
        if since is not None and since != self._held.get((incoming.source, announcement.number)):
            # Pull it anyway: some transports complete a message only then.
            incoming.pull()
            return False
        with named("write a message"):
            found = unpack(self._views_of(incoming), with_checksum=announcement.checksum is not None)
        if found != announcement.checksum:
            if since is not None:
                return False
            raise TransferError(
                f"message {announcement.number} of {self._links[incoming.source].peer} came with checksum {found} in "
                f"the place of {announcement.checksum}"
            )
        self._stream.synchronize()
        self._note(incoming)
        return True

    def _views_of(self, incoming: _Incoming) -> list[Block]:
        """The views of a message in its bucket, or in the memory where changes are applied."""
        bucket = incoming.pull()
        if incoming.announcement.changes_since is None:
            return self._views_in(bucket, incoming)
        assert self._whole is not None
        views = self._views_in(self._whole.tensor, incoming)
        self._become_whole(views, self._whole.tensor, bucket, incoming)
        return views

    def _views_in(self, bucket: Tensor, incoming: _Incoming) -> list[Block]:
        number, apart = incoming.announcement.number, incoming.announcement.zero_copy
        key = incoming.source, number, bucket.data_ptr(), apart, incoming.in_bucket
        if key not in self._views:
            message = self._messages[incoming.source][number]
            zero_copy = self._zero_copy[incoming.source][number] if apart else ()
            self._views[key] = blocks(
                message, bucket, self._tensors, "destination", zero_copy, in_bucket=incoming.in_bucket
            )
        return self._views[key]

    def _become_whole(self, views: list[Block], whole: Tensor, bucket: Tensor, incoming: _Incoming) -> None:
        """Gather the tensors into `whole`, which `views` refer to, and apply the changes in `bucket` to it."""
        announcement = incoming.announcement
        memory = whole[: self._messages[incoming.source][announcement.number].size_bytes]
        memory.zero_()
        pack(views, with_checksum=False)
        try:
            apply_changes(bucket[: announcement.size_bytes], memory)
        except ValueError as error:
            raise TransferError(
                f"message {announcement.number} of {self._links[incoming.source].peer} came with {error}"
            ) from error
