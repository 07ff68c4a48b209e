"""Control connections between the ranks of a refit: small messages about the large ones, and detection of dead peers.

They use TCP, on loopback if all ranks are on one machine. No read or write blocks longer than the timeout that was set
when the connection was made, and the exit of a peer's process is seen at once. `handshake.py` establishes them.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from typing import Any, TypeAlias, TypeVar, cast

from megarl.resharding.direct.wire import Failure, decode, encode

Kind = TypeVar("Kind")
Address: TypeAlias = tuple[str, int]
"""Host and port."""

_RAISED_S = "raised_s"


class TransferError(RuntimeError):
    """A transfer that cannot complete: a peer is gone, silent, failed, or not the expected one."""


class Link:
    """A connection to one peer; `peer` is its name in error messages."""

    def __init__(self, connection: Connection, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._connection = connection
        self._timeout_s = timeout_s
        self._kept: list[Any] = []
        """Messages that arrived while another kind was awaited."""

    @property
    def has_kept(self) -> bool:
        """Whether a message has been read that `receive` has not returned yet."""
        return bool(self._kept)

    def fileno(self) -> int:
        """The file descriptor, for `selectors`."""
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Send anything that pickles. Raises TransferError if the peer is gone."""
        try:
            self._connection.send_bytes(encode(message))
        except OSError as error:
            # The peer's last message says why it left, which is worth more than that it left.
            if self._connection.poll():
                self.receive(Failure)
            raise TransferError(f"{self.peer} is gone") from error

    def receive(self, kind: type[Kind]) -> Kind:
        """Return the next message of this kind. Raises TransferError if none comes, with the peer's reason if it
        failed.
        """
        message = self._kept.pop(0) if self._kept else self._next()
        if not isinstance(message, kind):
            raise TransferError(f"{self.peer} said {message} in place of {kind.__name__}")
        return message

    def check(self) -> None:
        """Raise TransferError if the peer is gone or has reported failure; other messages are kept for `receive`."""
        try:
            has_come = self._connection.poll()
        except OSError as error:
            raise TransferError(f"{self.peer} is gone") from error
        if has_come:
            self._kept.append(self._next())

    def _next(self) -> Any:
        try:
            message = decode(self._connection.recv_bytes())
        except BlockingIOError as error:  # the kernel's deadline, as the handshake set it
            raise TransferError(f"{self.peer} said nothing for {self._timeout_s:g} s (refit.timeout_s)") from error
        except (EOFError, OSError) as error:
            raise TransferError(f"{self.peer} is gone") from error
        if isinstance(message, Failure):
            raise TransferError(f"{self.peer} failed: {message.reason}")
        return message

    def close(self) -> None:
        """Close the connection; the peer sees it."""
        self._connection.close()


@contextmanager
def listening(links: Collection[Link]) -> Iterator[BaseSelector]:
    """Open a selector for links that are polled repeatedly, so that silent links cost nothing per poll.

    The caller unregisters a link that has nothing more to say.
    """
    with DefaultSelector() as selector:
        for link in links:
            selector.register(link, EVENT_READ)
        yield selector


def ready(selector: BaseSelector, links: Collection[Link], timeout_s: float) -> list[Link]:
    """Wait for and return the links that have something to `receive`, at least one; `links` are all registered links.

    Raises TransferError if none has within `timeout_s`.
    """
    if found := _wait(selector, links, timeout_s):
        return found
    peers = ", ".join(sorted(link.peer for link in links))
    raise TransferError(f"nothing came for {timeout_s:g} s (refit.timeout_s) from {peers}")


def ready_now(selector: BaseSelector, links: Collection[Link]) -> list[Link]:
    """The links that have something to `receive` already."""
    return _wait(selector, links, 0)


def as_they_come(links: Collection[Link], kind: type[Kind], timeout_s: float) -> Iterator[tuple[Link, Kind]]:
    """Yield the next message of this kind from every link, in arrival order: a silent link hides no failure.

    Raises TransferError as `ready` and `Link.receive`.
    """
    left = set(links)
    with listening(left) as selector:
        while left:
            for link in ready(selector, left, timeout_s):
                left.remove(link)
                selector.unregister(link)
                yield link, link.receive(kind)


def _wait(selector: BaseSelector, links: Collection[Link], timeout_s: float) -> list[Link]:
    if kept := [link for link in links if link.has_kept]:
        return kept
    return [cast(Link, key.fileobj) for key, _ in selector.select(timeout_s)]


@contextmanager
def notify_peers_on_error(links: Mapping[int, Link]) -> Iterator[None]:
    """If the body fails, tell all peers why, so that none of them waits for its timeout."""
    try:
        yield
    except BaseException as error:
        # Stamped before peers are told: the errors that they send back are consequences, and must have later times.
        vars(error)[_RAISED_S] = time.monotonic()
        notify_failure(links, reason_of(error))
        raise


def raised_s(error: BaseException | None) -> float:
    """The time when an error passed `notify_peers_on_error`, on this process's clock; infinity if it did not."""
    return vars(error).get(_RAISED_S, math.inf)


def notify_failure(links: Mapping[int, Link], reason: str) -> None:
    """Tell all peers that are still connected that this rank has failed."""
    for link in list(links.values()):
        with suppress(TransferError):
            link.send(Failure(reason))


def reason_of(error: BaseException) -> str:
    """Describe an error for peers that did not see it themselves."""
    return str(error) or type(error).__name__
