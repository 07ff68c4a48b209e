"""The refit of megarl: each rank's own part of the plan, through two buckets of shared memory per trainer rank."""

import secrets
from collections.abc import Callable
from functools import partial

from megarl.resharding.receiver import Receiver
from megarl.resharding.sender import Sender
from megarl.resharding.transports.ends import Meeting
from resharding.party import Destination, Party
from resharding.processes import DEADLINE_S

_LOOPBACK = "127.0.0.1"
_VERSION = 1


class Planned:
    """A run goes from the beginning of a refit until all has been received and, with checksums, verified."""

    def __init__(self, party: Party, destination: Destination, *, with_checksum: bool) -> None:
        self._party, self._destination = party, destination
        layout = party.layout(destination)
        derive = party.scenario.outgoing if party.is_source else party.scenario.incoming
        streams = derive(layout, party.number)
        moved = sum(message.size_bytes for stream in streams.values() for message in stream)
        self.moved_bytes = moved if party.is_source else 0
        self._run: Callable[[], object]
        if party.is_source:
            sender = Sender(party.number, streams, party.tensors, _LOOPBACK)
            sender.join(_meeting(party, sender))
            self._run = partial(sender.send, _VERSION, with_checksum=with_checksum)
        else:
            receiver = Receiver(party.number, streams, party.written[destination], _meeting(party, None))
            receiver.join()
            self._run = partial(receiver.receive, _VERSION)

    def run(self) -> None:
        """Send, or receive."""
        self._run()

    def wipe(self) -> None:
        """Forget what was written."""
        self._party.wipe(self._destination)

    def wrong(self) -> list[str]:
        """Names of tensors with a wrong value."""
        return self._party.wrong(self._destination)


def _meeting(party: Party, sender: Sender | None) -> Meeting:
    said = party.exchange((secrets.token_bytes(16), sender and sender.address))
    doors = [address for _, address in said[: party.sources]]
    return Meeting("shared_memory", said[0][0], doors, None, len(party.workers), DEADLINE_S)
