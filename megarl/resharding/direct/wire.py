"""Messages between a source and a destination over their link."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hello:
    """The first message of a destination: who it is, and a digest of the messages that it expects."""

    destination: int
    digest: str


@dataclass(frozen=True)
class Connected:
    """The destination has taken up the source's offer."""


@dataclass(frozen=True)
class Announcement:
    """Message `number` of the pair lies in a bucket of the source, or is on its way from there."""

    version: int
    number: int
    bucket: int
    size_bytes: int
    checksum: int | None


@dataclass(frozen=True)
class Acknowledgement:
    """The destination needs the bucket no more."""

    bucket: int
