"""Tracks which direct messages have arrived, so that a rank can relay what is in them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from threading import Condition

from converters.boxes import Box
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.messages_by_peer import DestinationMessages, MessageId


class RelayReadiness:
    """Lets the thread that relays messages wait for the one that receives what is in them, once in every refit.

    Raises ValueError for a relay of something that does not come directly.
    """

    def __init__(self, messages: DestinationMessages) -> None:
        self._needs = _needs(messages)
        self.timeout_s = 0.0
        """How long to wait for any message."""
        self._changed = Condition()
        self.expect()

    def expect(self) -> None:
        """Begin a refit: nothing has come."""
        with self._changed:
            self._came: set[MessageId] = set()
            self._failure: str | None = None

    def add(self, incoming: MessageId) -> None:
        """Note that a message is here."""
        with self._changed:
            self._came.add(incoming)
            self._changed.notify()

    def fail(self, failure: str) -> None:
        """Let `ready` raise this `failure`: nothing more will come."""
        with self._changed:
            self._failure = failure
            self._changed.notify()

    def ready(self, outgoing: Iterable[MessageId]) -> Iterator[MessageId]:
        """Yield all messages, each when what it holds is all here; the first of several.

        Raises TransferError after a failure, or if nothing comes for the time.
        """
        left = dict.fromkeys(outgoing)
        while left:
            yield (message := self._first_of(left))
            del left[message]

    def _first_of(self, left: Iterable[MessageId]) -> MessageId:
        with self._changed:
            while True:
                for outgoing in left:
                    if self._needs[outgoing] <= self._came:
                        return outgoing
                if self._failure is not None:
                    raise TransferError(self._failure)
                if not self._changed.wait(self.timeout_s):
                    raise TransferError(f"nothing came for {self.timeout_s:g} s (refit.timeout_s) to relay")


def _needs(messages: DestinationMessages) -> Mapping[MessageId, set[MessageId]]:
    """For each message that is relayed, the messages that bring it."""
    coming: dict[str, list[tuple[Box, MessageId]]] = defaultdict(list)
    for source, from_source in messages.direct.items():
        for number, message in enumerate(from_source):
            for piece in message.pieces:
                coming[piece.destination_name].append((piece.destination_box, (source, number)))
                if piece.scales:
                    coming[piece.scales.destination_name].append((piece.scales.destination_box, (source, number)))
    needs: dict[MessageId, set[MessageId]] = {}
    for destination, to_neighbour in messages.relays_out.items():
        for number, message in enumerate(to_neighbour):
            needed = needs[destination, number] = set()
            for piece in message.pieces:
                missing = piece.source_box.size
                for box, incoming in coming[piece.source_name]:
                    if common := box.intersect(piece.source_box):
                        missing -= common.size
                        needed.add(incoming)
                if missing:
                    raise ValueError(f"{piece.source_box} of {piece.source_name} is relayed and does not come")
    return needs
