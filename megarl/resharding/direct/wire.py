"""Messages between a source and a destination over their link."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Hello:
    """The first message of a destination: who it is, and a digest of the messages that it expects.

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
    """The destination needs the bucket no more.

    Example: `Acknowledgement(bucket=1)`.
    """

    bucket: int


@dataclass(frozen=True)
class Failure:
    """The last message of a rank that failed.

    Example: `Failure("trainer rank 3 is gone")`.
    """

    reason: str
