"""One peer that comes to a listener."""

from megarl.resharding.direct.connections import Address, Link, TransferError
from megarl.resharding.direct.handshake import connect_all


def connect(address: Address, key: bytes, peer: str, timeout_s: float) -> Link:
    """Connect to the listener of `peer`. Raises TransferError if it does not answer, or with another key."""
    (found,) = connect_all({peer: address}, key, timeout_s)
    if isinstance(found, TransferError):
        # An error holds the frame that raises it; were it held there, all that callers hold would stay with it.
        raise TransferError(str(found))
    return found
