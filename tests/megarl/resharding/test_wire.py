"""Bytes of the messages between ranks: a message comes out of them as it went in."""

import hypothesis.strategies as st
from hypothesis import given

from megarl.resharding.direct.wire import Acknowledgement, Announcement, Connected, Failure, Hello, decode, encode

COUNTS = st.integers(0, 2**63 - 1)
ANNOUNCEMENTS = st.builds(
    Announcement,
    version=COUNTS,
    number=COUNTS,
    bucket=COUNTS,
    size_bytes=COUNTS,
    checksum=st.none() | st.integers(0, 2**64 - 1),
    changes_since=st.none() | COUNTS,
    zero_copy=st.booleans(),
)
OTHERS = st.sampled_from([Hello(4, "9f86"), Connected({0: (0, 1), 3: ()}), Failure("trainer rank 3 is gone"), None])


@given(ANNOUNCEMENTS | st.builds(Acknowledgement, COUNTS, st.booleans()) | OTHERS)
def test_a_message_comes_out_of_its_bytes_as_it_went_in(message):
    found = decode(encode(message))
    assert (type(found), found) == (type(message), message)
