"""Messages between a source and a destination over their link, and their encoding.

Messages that go with every bucket have a fixed binary encoding: pickle's code is large, and each bucket evicts it from
the CPU caches. All others are pickled.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any


@dataclass(frozen=True)
class Hello:
    """The first message of a destination: its rank, and a digest of the messages that it expects.

    Example: `Hello(destination=4, digest="9f86...")`.
    """

    destination: int
    digest: str


@dataclass(frozen=True)
class Connected:
    """The destination has accepted the source's offer.

    Example: `Connected({0: (0, 1), 3: (0,)})`: it reads the first two pieces of message 0 and the first piece of
    message 3 in place, in the source's tensors.
    """

    zero_copy: Mapping[int, tuple[int, ...]]
    """Message number -> numbers of the pieces that skip the buckets."""


@dataclass(frozen=True)
class Announcement:
    """Message `number` of the pair is in a bucket of the source, or on its way from there.

    Example: `Announcement(version=7, number=0, bucket=1, size_bytes=33_554, checksum=0x1C291CA3, changes_since=6)`.
    """

    version: int
    number: int
    bucket: int
    size_bytes: int
    checksum: int | None
    """Checksum of the whole message, even if only its changes travel; None without checksums."""
    changes_since: int | None = None
    """Version that the changes are relative to; None if the message travels whole."""
    zero_copy: bool = False
    """Whether the pieces that can skip the bucket are left out of it, to be read in place."""


@dataclass(frozen=True)
class Acknowledgement:
    """The destination no longer needs the contents of the bucket.

    Example: `Acknowledgement(bucket=1)`.
    """

    bucket: int
    resend_whole: bool = False
    """Whether the changes do not apply to what the destination holds, so that the message must be sent whole."""


@dataclass(frozen=True)
class Failure:
    """The last message of a rank that failed.

    Example: `Failure("trainer rank 3 is gone")`.
    """

    reason: str


_ANNOUNCED, _ACKNOWLEDGED, _PICKLED = b"a", b"k", b"p"
_ANNOUNCEMENT = Struct("<c4qQq3?")
"""The flags at the end say whether there is a checksum, whether there is an earlier version, and `zero_copy`."""
_ACKNOWLEDGEMENT = Struct("<cq?")


def encode(message: Any) -> bytes:
    """Encode a message that pickles."""
    if isinstance(message, Announcement):
        checksum, since = message.checksum, message.changes_since
        numbers = message.version, message.number, message.bucket, message.size_bytes, checksum or 0, since or 0
        return _ANNOUNCEMENT.pack(_ANNOUNCED, *numbers, checksum is not None, since is not None, message.zero_copy)
    if isinstance(message, Acknowledgement):
        return _ACKNOWLEDGEMENT.pack(_ACKNOWLEDGED, message.bucket, message.resend_whole)
    return _PICKLED + pickle.dumps(message)


def decode(data: bytes) -> Any:
    """Decode a message; unpickles, so only for peers that have proved that they know the key."""
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
