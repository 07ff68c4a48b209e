"""Links between ranks: what is said while something else is waited for."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.resharding.direct.connections import Listening, TransferError, as_they_come, ready
from megarl.resharding.direct.meeting import Listener, connect
from megarl.resharding.direct.wire import Acknowledgement, Failure, Hello
from megatron_ext.loopback import LOOPBACK


@pytest.fixture
def ends():
    """Both ends of a link."""
    listener = Listener(LOOPBACK)
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, b"key", 5.0)
        here = connect(listener.address, b"key", "a source", 5.0)
        here.send(Hello(0, ""))
        there, _ = accepting.result()
    yield here, there
    for each in (here, there, listener):
        each.close()


def test_what_a_check_finds_is_received_in_its_order(ends):
    here, there = ends
    with Listening([here]) as listening:
        check_what_is_received(listening, here, there)


def check_what_is_received(listening, here, there):
    here.check()
    assert listening.ready_now() == []
    for bucket in range(2):
        there.send(Acknowledgement(bucket))
        while len(here._kept) == bucket:
            here.check()
    # Nothing new has come, and it is ready all the same.
    assert listening.ready_now() == [here]
    there.send(Acknowledgement(2))
    received = []
    for _ in range(3):
        assert listening.ready(0.5) == [here]
        received.append(here.receive(Acknowledgement).bucket)
    assert received == [0, 1, 2]
    assert listening.ready_now() == []
    with pytest.raises(TransferError, match=r"^nothing came for 0\.01 s \(refit\.timeout_s\) from a source$"):
        listening.ready(0.01)
    there.send(Acknowledgement(3))
    listening.end(here)
    assert (len(listening), listening.ready_now()) == (0, [])


def test_each_link_is_listened_to_until_its_message_has_come(ends):
    here, there = ends
    # A second message is of what comes next.
    for bucket in range(2):
        there.send(Acknowledgement(bucket))
    assert [said.bucket for _, said in as_they_come([here], Acknowledgement, 5.0)] == [0]
    assert here.receive(Acknowledgement).bucket == 1


def test_a_check_raises_what_ends_a_wait(ends):
    here, there = ends
    there.send(Failure("on purpose"))
    assert ready([here], 5.0) == [here]
    with pytest.raises(TransferError, match=r"^a source failed: on purpose$"):
        here.check()
    there.close()
    assert ready([here], 5.0) == [here]
    with pytest.raises(TransferError, match=r"^a source is gone$"):
        here.check()
