"""Messages between a source and a destination over their link, and their bytes.

A message that goes with every bucket has fixed bytes of its own: pickle's code is large, and has left the processor's
caches whenever a bucket has gone through them. All else pickles.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any


@dataclass(frozen=True)
class Hello:
    """The first message of a destination: its number, and a digest of the messages that it expects.

    Example: `Hello(destination=4, digest="9f86...")`.
    """

    destination: int
    digest: str


@dataclass(frozen=True)
class Connected:
    """The destination has taken up the source's offer.

    Example: `Connected({0: (0, 1), 3: (0,)})`: it reads the first two pieces of message 0, and all of message 3, where
    they are in the source's tensors.
    """

    zero_copy: Mapping[int, tuple[int, ...]]
    """Message number -> pieces that skip the buckets."""


@dataclass(frozen=True)
class Announcement:
    """Message `number` of the pair lies in a bucket of the source, or is on its way from there.

    Example: `Announcement(version=7, number=0, bucket=1, size_bytes=33_554, checksum=0x1C291CA3, changes_since=6)`.
    """

    version: int
    number: int
    bucket: int
    size_bytes: int
    checksum: int | None
    """Checksum of the whole message, however it travels; None where nobody asked for one."""
    changes_since: int | None = None
    """Version that the bytes are changes of; None if they are the message."""
    zero_copy: bool = False
    """Whether the pieces that can skip the bucket are not in it, but where they are."""


@dataclass(frozen=True)
class Acknowledgement:
    """The destination needs what is in the bucket no more.

    Example: `Acknowledgement(bucket=1)`.
    """

    bucket: int
    resend_whole: bool = False
    """Whether the message came as changes of another one than is there, and has to come whole."""


@dataclass(frozen=True)
class Failure:
    """The last message of a rank that failed.

    Example: `Failure("trainer rank 3 is gone")`.
    """

    reason: str


_ANNOUNCED, _ACKNOWLEDGED, _PICKLED = b"a", b"k", b"p"
_ANNOUNCEMENT = Struct("<c4qQq3?")
"""Checksum and earlier version are followed by whether there is one."""
_ACKNOWLEDGEMENT = Struct("<cq?")


def encode(message: Any) -> bytes:
    """The bytes of anything that pickles."""
    if isinstance(message, Announcement):
        checksum, since = message.checksum, message.changes_since
        numbers = message.version, message.number, message.bucket, message.size_bytes, checksum or 0, since or 0
        return _ANNOUNCEMENT.pack(_ANNOUNCED, *numbers, checksum is not None, since is not None, message.zero_copy)
    if isinstance(message, Acknowledgement):
        return _ACKNOWLEDGEMENT.pack(_ACKNOWLEDGED, message.bucket, message.resend_whole)
    return _PICKLED + pickle.dumps(message)


def decode(data: bytes) -> Any:
    """The message of such bytes, from a peer that knows the key of the run."""
    kind = data[:1]
    if kind == _ANNOUNCED:
        _, version, number, bucket, size_bytes, checksum, since, *is_so = _ANNOUNCEMENT.unpack(data)
        has_checksum, is_changes, zero_copy = is_so
        known = checksum if has_checksum else None, since if is_changes else None
        return Announcement(version, number, bucket, size_bytes, *known, zero_copy)
    if kind == _ACKNOWLEDGED:
        _, bucket, resend_whole = _ACKNOWLEDGEMENT.unpack(data)
        return Acknowledgement(bucket, resend_whole)
    return pickle.loads(data[1:])
