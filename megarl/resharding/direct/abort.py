"""Aborts a rendezvous: ranks waiting for a peer that will never come are told so instead of timing out."""

from contextlib import suppress
from dataclasses import replace

from megarl.resharding.direct.connections import Link, TransferError
from megarl.resharding.direct.handshake import connect_all
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.wire import Failure

# Short: a rank that has all its peers has stopped listening, and those peers tell it.
_ANSWER_S = 5.0


def abort_rendezvous(rendezvous: Rendezvous, reason: str) -> None:
    """Make all ranks that are still waiting for peers fail with `reason`; ranks that do not answer are skipped."""
    hurried = replace(rendezvous, timeout_s=min(_ANSWER_S, rendezvous.timeout_s))
    TRANSPORTS[rendezvous.transport].abort_rendezvous(hurried, reason)
    listeners = enumerate((*rendezvous.listeners, *rendezvous.relay_listeners))
    for found in connect_all({f"rank {number}": each for number, each in listeners}, hurried.key, hurried.timeout_s):
        if isinstance(found, Link):
            with suppress(TransferError):
                found.send(Failure(reason))
            found.close()
