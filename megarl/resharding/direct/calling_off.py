"""Calling a meeting off: ranks that wait for one that will not come are told so by who knows it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from megarl.resharding.direct.connections import Address, TransferError, connect
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.wire import Failure

# A rank that has all its peers listens no more, and is told by them.
_ANSWER_S = 5.0
_AT_ONCE = 32


def call_off(rendezvous: Rendezvous, reason: str) -> None:
    """Let all ranks that have not met yet give up, for this reason; those that do not answer are left alone."""
    hurried = replace(rendezvous, timeout_s=min(_ANSWER_S, rendezvous.timeout_s))

    def tell(address: Address) -> None:
        with suppress(TransferError):
            connect(address, hurried.key, "a rank", hurried.timeout_s).send(Failure(reason))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        told = pool.map(tell, [*rendezvous.listeners, *rendezvous.relay_listeners])
        TRANSPORTS[rendezvous.transport].call_off(hurried, reason)
        list(told)
