"""megarl's refit: each rank's own part of the plan, through two buckets per trainer rank."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

from megarl.resharding.direct.receiver import Receiver
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transports import MAPPED_MEMORY_TRANSPORT, TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.transfer_stats import TransferStats
from megatron_ext.loopback import LOOPBACK, open_store
from resharding.contenders.nixl_read import ways
from resharding.party import Destination, Party
from resharding.processes import DEADLINE_S

_VERSION = 1


class Direct:
    """A run lasts from the start of a refit until everything is received and, with checksums, verified."""

    def __init__(
        self,
        party: Party,
        destination: Destination,
        *,
        with_checksum: bool,
        transport: str | None = None,
        ucx_tls: str = "",
        with_changes: bool = False,
    ) -> None:
        self._party, self._destination = party, destination
        self._with_checksum, self._with_changes = with_checksum, with_changes
        transport = transport or MAPPED_MEMORY_TRANSPORT["gloo" if party.scenario.device == "cpu" else "nccl"]
        layout = party.layout(destination)
        derive = party.scenario.outgoing if party.is_source else party.scenario.incoming
        messages = derive(layout, party.number)
        self.moved_bytes = 0
        self._run: Callable[[], TransferStats | None]
        if party.is_source:
            sender = Sender(party.number, messages, party.tensors, LOOPBACK)
            rendezvous = self._rendezvous(transport, sender)
            with ways(ucx_tls):
                sender.connect(rendezvous)
            self._run = partial(sender.send, _VERSION)
        else:
            receiver = Receiver(party.number, messages, party.written[destination], self._rendezvous(transport, None))
            with ways(ucx_tls):
                receiver.connect()
            self._run = partial(receiver.receive, _VERSION)

    def run(self) -> None:
        """Send, or receive."""
        moved = self._run()
        self.moved_bytes = 0 if moved is None else moved.size_bytes

    def wipe(self) -> None:
        """Overwrite what was written."""
        self._party.wipe(self._destination)

    def wrong(self) -> list[str]:
        """Names of tensors with a wrong value."""
        return self._party.wrong(self._destination)

    def _rendezvous(self, transport: str, sender: Sender | None) -> Rendezvous:
        party, port = self._party, None
        if TRANSPORTS[transport].needs_store and party.place.rank == 0:
            self._store = open_store(LOOPBACK, timedelta(seconds=DEADLINE_S))
            port = self._store.port
        said = party.exchange((secrets.token_bytes(16), port, sender and sender.address))
        key, port, _ = said[0]
        listeners = [address for *_, address in said[: party.sources]]
        store = (LOOPBACK, port) if port else None
        rendezvous = Rendezvous(transport, key, listeners, store, len(party.workers), DEADLINE_S)
        return replace(rendezvous, with_checksum=self._with_checksum, with_changes=self._with_changes)


class DirectChanges(Direct):
    """The same, sending only changes into separate tensors: from run to run the last bit of 1 element in 50 changes."""

    def __init__(self, party: Party, destination: Destination, *, transport: str, ucx_tls: str = "") -> None:
        super().__init__(
            party, destination, with_checksum=True, transport=transport, ucx_tls=ucx_tls, with_changes=True
        )
        self._is_changed = False

    def change(self) -> None:
        """Switch the weights to the other of two versions."""
        self._is_changed = not self._is_changed
        self._party.change(self._is_changed)

    def wipe(self) -> None:
        """Put the other version into the workers."""
        self.change()
        self.run()
        self.change()
