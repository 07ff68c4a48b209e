"""Tracks which direct messages have arrived, so that a rank can relay their contents."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from threading import Condition

from converters.boxes import Box
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.messages_by_peer import DestinationMessages, MessageId


class RelayReadiness:
    """Lets the relaying thread wait for the receiving thread, once per refit.

    Raises ValueError if a relayed message contains something that does not arrive directly.
    """

    def __init__(self, messages: DestinationMessages) -> None:
        self._needs = _needs(messages)
        self.timeout_s = 0.0
        """How long to wait for the next message."""
        self._changed = Condition()
        self.expect()

    def expect(self) -> None:
        """Begin a refit, in which nothing has arrived yet."""
        with self._changed:
            self._came: set[MessageId] = set()
            self._failure: str | None = None

    def add(self, incoming: MessageId) -> None:
        """Note that a message has arrived."""
        with self._changed:
            self._came.add(incoming)
            self._changed.notify()

    def fail(self, failure: str) -> None:
        """Make `ready` raise `failure`: nothing more will arrive."""
        with self._changed:
            self._failure = failure
            self._changed.notify()

    def ready(self, outgoing: Iterable[MessageId]) -> Iterator[MessageId]:
        """Yield all messages, each once its contents have arrived; if several are ready, the first in order.

        Raises TransferError after `fail`, or if nothing arrives for `timeout_s`.
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
    """Map each relayed message to the direct messages that bring its contents."""
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
