"""Calling a meeting off: ranks that wait for one that will not come are told so by who knows it."""

from contextlib import suppress
from dataclasses import replace

from megarl.resharding.direct.connections import Link, TransferError
from megarl.resharding.direct.handshake import connect_all
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.wire import Failure

# A rank that has all its peers listens no more, and is told by them.
_ANSWER_S = 5.0


def abort_rendezvous(rendezvous: Rendezvous, reason: str) -> None:
    """Let all ranks that have not met yet give up, for this reason; those that do not answer are left alone."""
    hurried = replace(rendezvous, timeout_s=min(_ANSWER_S, rendezvous.timeout_s))
    TRANSPORTS[rendezvous.transport].abort_rendezvous(hurried, reason)
    listeners = enumerate((*rendezvous.listeners, *rendezvous.relay_listeners))
    for found in connect_all({f"rank {number}": each for number, each in listeners}, hurried.key, hurried.timeout_s):
        if isinstance(found, Link):
            with suppress(TransferError):
                found.send(Failure(reason))
            found.close()
