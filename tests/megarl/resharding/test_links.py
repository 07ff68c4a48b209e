"""Links between ranks: what is said while something else is waited for."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from one_link import connect

from megarl.resharding.direct.connections import TransferError, as_they_come, listening, ready, ready_now
from megarl.resharding.direct.handshake import Listener
from megarl.resharding.direct.wire import Acknowledgement, Failure, Hello
from megatron_ext.loopback import LOOPBACK


@contextmanager
def met(timeout_s: float):
    """Both ends of a link, of which the first waits for so long."""
    listener = Listener(LOOPBACK)
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, b"key", 5.0)
        here = connect(listener.address, b"key", "a source", timeout_s)
        here.send(Hello(0, ""))
        there, _ = accepting.result()
    yield here, there
    for each in (here, there, listener):
        each.close()


@pytest.fixture
def ends():
    """Both ends of a link."""
    with met(5.0) as both:
        yield both


def test_what_a_check_finds_is_received_in_its_order(ends):
    here, there = ends
    with listening([here]) as selector:
        check_what_is_received(selector, here, there)


def check_what_is_received(selector, here, there):
    here.check()
    assert ready_now(selector, [here]) == []
    for bucket in range(2):
        there.send(Acknowledgement(bucket))
        while len(here._kept) == bucket:
            here.check()
    # Nothing new has come, and it is ready all the same.
    assert ready_now(selector, [here]) == [here]
    there.send(Acknowledgement(2))
    received = []
    for _ in range(3):
        assert ready(selector, [here], 0.5) == [here]
        received.append(here.receive(Acknowledgement).bucket)
    assert received == [0, 1, 2]
    assert ready_now(selector, [here]) == []
    with pytest.raises(TransferError, match=r"^nothing came for 0\.01 s \(refit\.timeout_s\) from a source$"):
        ready(selector, [here], 0.01)
    there.send(Acknowledgement(3))
    selector.unregister(here)
    assert ready_now(selector, []) == []


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
    with listening([here]) as selector:
        assert ready(selector, [here], 5.0) == [here]
    with pytest.raises(TransferError, match=r"^a source failed: on purpose$"):
        here.check()
    there.close()
    with listening([here]) as selector:
        assert ready(selector, [here], 5.0) == [here]
    with pytest.raises(TransferError, match=r"^a source is gone$"):
        here.check()


@pytest.mark.parametrize("begun", [b"", b"\0"])
def test_a_peer_that_is_silent_or_stops_in_mid_message_is_given_up(begun):
    # Both ends have to meet in that time, too.
    with met(1.0) as (here, there):
        os.write(there.fileno(), begun)
        with pytest.raises(TransferError, match=r"^a source said nothing for 1 s \(refit\.timeout_s\)$"):
            here.receive(Acknowledgement)
