"""Establishes authenticated connections between ranks: one side listens, the other connects.

Both ends prove that they know the key of the rendezvous before either unpickles anything from the other. A rank runs
its handshakes with all peers concurrently, so it waits for the slowest, not for the sum.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from errno import EINPROGRESS
from hmac import compare_digest, digest
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from secrets import token_bytes
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import cast

from megarl.resharding.direct.connections import Address, Link, TransferError
from megarl.resharding.direct.wire import Failure, Hello

_BACKLOG = 4096
_COMES, _LISTENS = b"comes", b"listens"
_BYTES = 32
"""Length of a nonce, and of a proof."""


class Listener:
    """Listens for peers on a free port of `host`."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        self._selector = DefaultSelector()
        self._selector.register(self._socket, EVENT_READ)
        self._aborted, self._abort = socket.socketpair()
        self._selector.register(self._aborted, EVENT_READ)
        self._reason = ""
        self._coming: set[_Handshake | Link] = set()
        """Peers that have not yet finished the handshake, or have not yet sent their `Hello`."""

    def accept(self, key: bytes, timeout_s: float) -> tuple[Link, Hello]:
        """Return the next peer that has proved that it knows the key, and its `Hello`; all others are turned away.

        Raises TransferError if none comes in time, if a peer accepted earlier fails or disconnects, or on `abort`.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for ready, _ in self._selector.select(left):
                found = ready.fileobj
                if found is self._aborted:
                    raise TransferError(self._reason)
                if isinstance(found, _Handshake):
                    self._go_on(found, timeout_s)
                elif not isinstance(found, Link):
                    self._let_in(key)
                elif found in self._coming:
                    self._coming.remove(found)
                    return found, found.receive(Hello)
                else:
                    found.receive(Failure)
        raise TransferError(f"no peer came to {self.address} within {timeout_s:g} s (refit.timeout_s)")

    def abort(self, reason: str) -> None:
        """Make `accept` raise TransferError with this reason, even while another thread is blocked in it."""
        self._reason = reason
        with suppress(OSError):  # nobody waits at a closed listener
            self._abort.send(b"\0")

    def close(self) -> None:
        """Stop listening; peers that have not been accepted see the connection close."""
        for each in (*self._coming, self._socket, self._aborted, self._abort, self._selector):
            each.close()
        self._coming = set()

    def _let_in(self, key: bytes) -> None:
        try:
            connected = self._socket.accept()[0]
        except OSError:  # the peer has left again
            return
        handshake = _Handshake(connected, key, _LISTENS, _COMES)
        self._coming.add(handshake)
        self._selector.register(handshake, EVENT_WRITE)

    def _go_on(self, handshake: "_Handshake", timeout_s: float) -> None:
        result = _go_on(self._selector, handshake, "a peer", timeout_s)
        if result is not None:
            self._coming.remove(handshake)
        if isinstance(result, Link):
            self._coming.add(result)
            self._selector.register(result, EVENT_READ)


def connect_all(listeners: Mapping[str, Address], key: bytes, timeout_s: float) -> Iterator[Link | TransferError]:
    """Connect to all listeners concurrently; yield each link as its peer answers, or the error if it does not."""
    deadline = time.monotonic() + timeout_s
    coming: dict[_Handshake, str] = {}
    with DefaultSelector() as selector:
        try:
            for peer, address in listeners.items():
                coming[handshake := _Handshake.begun(address, key)] = peer
                selector.register(handshake, EVENT_WRITE)
            while coming and (left := deadline - time.monotonic()) > 0:
                for ready, _ in selector.select(left):
                    handshake = cast(_Handshake, ready.fileobj)
                    peer = coming[handshake]
                    result = _go_on(selector, handshake, peer, timeout_s)
                    if result is not None:
                        del coming[handshake]
                        yield result if isinstance(result, Link) else _no_answer(peer, listeners[peer], result)
            for peer in coming.values():
                yield _no_answer(peer, listeners[peer], f"nothing came for {timeout_s:g} s (refit.timeout_s)")
        finally:
            for handshake in coming:
                handshake.close()


def _go_on(selector: DefaultSelector, handshake: "_Handshake", peer: str, timeout_s: float) -> Link | Exception | None:
    """Take the next step of a handshake whose socket is ready; return the link when it is done.

    Returns None if steps are left, and the error if the handshake failed.
    """
    try:
        if not handshake.go_on():
            selector.modify(handshake, EVENT_READ)
            return None
    except (AuthenticationError, EOFError, OSError) as error:
        selector.unregister(handshake)
        handshake.close()
        return error
    selector.unregister(handshake)
    return Link(handshake.connection(timeout_s), peer, timeout_s)


def _no_answer(peer: str, address: Address, reason: object) -> TransferError:
    return TransferError(f"{peer} does not answer at {address}: {reason}")


class _Handshake:
    """A non-blocking mutual authentication by a shared key.

    Each end sends a nonce, then an HMAC of both nonces and its own role. The role prevents reflection attacks: an end
    does not accept its own proof.
    """

    def __init__(self, connected: socket.socket, key: bytes, own: bytes, other: bytes, error: int = 0) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._key, self._own, self._other = connected, key, own, other
        self._nonce = b""
        self._came = b""
        self._error = error

    @classmethod
    def begun(cls, address: Address, key: bytes) -> "_Handshake":
        """Start connecting to an address; a refusal shows at the first step."""
        connecting = socket.socket()
        connecting.setblocking(False)
        error = connecting.connect_ex(address)
        return cls(connecting, key, _COMES, _LISTENS, 0 if error == EINPROGRESS else error)

    def fileno(self) -> int:
        """The file descriptor, for a selector: wait for writing before the first step, for reading after it."""
        return self._socket.fileno()

    def go_on(self) -> bool:
        """Take the next step. Returns whether the other end has proved that it knows the key.

        Raises OSError or EOFError if the other end is gone, AuthenticationError if it does not know the key.
        """
        if not self._nonce:
            self._begin()
            return False
        before = len(self._came)
        self._came += self._read(2 * _BYTES - before)
        nonce, proof = self._came[:_BYTES], self._came[_BYTES:]
        if before < _BYTES <= len(self._came):
            self._socket.sendall(self._proof(self._own, self._nonce, nonce))
        if len(proof) < _BYTES:
            return False
        if not compare_digest(proof, self._proof(self._other, nonce, self._nonce)):
            raise AuthenticationError("it has another key")
        return True

    def connection(self, timeout_s: float) -> Connection:
        """Turn the authenticated socket into a connection in which no read or write blocks longer than `timeout_s`."""
        # The kernel enforces the timeout, even in the middle of a message.
        interval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
        self._socket.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, interval)
        return Connection(self._socket.detach())

    def close(self) -> None:
        """Break off; the other end sees it."""
        self._socket.close()

    def _begin(self) -> None:
        if error := self._error or self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        self._nonce = token_bytes(_BYTES)
        self._socket.sendall(self._nonce)

    def _read(self, at_most: int) -> bytes:
        came = self._socket.recv(at_most)
        if not came:
            raise EOFError("it is gone")
        return came

    def _proof(self, end: bytes, own: bytes, other: bytes) -> bytes:
        return digest(self._key, end + own + other, "sha256")
