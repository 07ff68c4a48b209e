"""Messages between a source and a destination over their link."""

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
    """The destination has taken up the source's offer."""


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
