"""Links between ranks: what is said while something else is waited for."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.resharding.direct.connections import TransferError, ready, ready_now
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
    here.check()
    assert ready_now([here]) == []
    for bucket in range(2):
        there.send(Acknowledgement(bucket))
        while len(here._kept) == bucket:
            here.check()
    # Nothing new has come, and it is ready all the same.
    assert ready_now([here]) == [here]
    there.send(Acknowledgement(2))
    received = []
    for _ in range(3):
        assert ready([here], 0.5) == [here]
        received.append(here.receive(Acknowledgement).bucket)
    assert received == [0, 1, 2]
    assert ready_now([here]) == []


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
