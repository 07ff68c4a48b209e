"""How ranks come to their links: all peers of a rank at the same time, and nobody who does not know the key."""

import gc
import select
import socket
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from threading import Barrier

import pytest
from one_link import connect

from megarl.resharding.direct.connections import Link, TransferError
from megarl.resharding.direct.handshake import Listener, connect_all
from megarl.resharding.direct.wire import Failure, Hello
from megatron_ext.loopback import LOOPBACK

KEY, TIMEOUT_S = b"key", 5.0
PEERS = 8


@pytest.fixture
def listen():
    """Makes listeners, which are closed at the end."""
    made = []

    def make():
        made.append(Listener(LOOPBACK))
        return made[-1]

    yield make
    for listener in made:
        listener.close()


def test_a_rank_has_called_all_peers_before_the_first_answers(listen):
    listeners = [listen() for _ in range(PEERS)]
    all_are_called = Barrier(PEERS)

    def answer(listener):
        assert select.select([listener._socket], [], [], TIMEOUT_S)[0]
        all_are_called.wait(TIMEOUT_S)
        return listener.accept(KEY, TIMEOUT_S)[1]

    with ThreadPoolExecutor(PEERS) as pool:
        answering = pool.map(answer, listeners)
        addresses = {f"peer {number}": each.address for number, each in enumerate(listeners)}
        links = list(connect_all(addresses, KEY, TIMEOUT_S))
        for link in links:
            link.send(Hello(int(link.peer.removeprefix("peer ")), ""))
        assert [hello.destination for hello in answering] == list(range(PEERS))
    for link in links:
        link.close()


def test_a_rank_hears_the_peers_that_answer_while_one_does_not(listen):
    silent, *others = [listen() for _ in range(3)]
    addresses = {f"peer {number}": each.address for number, each in enumerate((silent, *others))}
    with ThreadPoolExecutor(3) as pool:
        found = connect_all(addresses, KEY, TIMEOUT_S)
        accepting = [pool.submit(each.accept, KEY, TIMEOUT_S) for each in others]
        links = [next(found), next(found)]
        assert {link.peer for link in links} == {"peer 1", "peer 2"}
        accepting.append(pool.submit(silent.accept, KEY, TIMEOUT_S))
        links += found
        assert links[2].peer == "peer 0"
        for link in links:
            link.send(Hello(0, ""))
        for each in (*links, *(accepted.result()[0] for accepted in accepting)):
            each.close()


def test_a_listener_meets_all_that_come_before_the_first_says_who_it_is(listen):
    listener = listen()
    all_have_met = Barrier(PEERS)

    def come(number):
        link = connect(listener.address, KEY, "the listener", TIMEOUT_S)
        all_have_met.wait(TIMEOUT_S)
        link.send(Hello(number, ""))
        return link

    with ThreadPoolExecutor(PEERS) as pool:
        coming = pool.map(come, range(PEERS))
        links, hellos = zip(*(listener.accept(KEY, TIMEOUT_S) for _ in range(PEERS)), strict=True)
        assert {hello.destination for hello in hellos} == set(range(PEERS))
        for link in (*coming, *links):
            link.close()


@pytest.mark.parametrize("said", [b"", b"half a nonce", b"a nonce, and nothing after it ...."])
def test_a_stranger_who_stops_in_the_middle_holds_nobody_up(listen, said):
    listener = listen()
    with socket.create_connection(listener.address) as stranger, ThreadPoolExecutor(1) as pool:
        stranger.sendall(said)
        accepting = pool.submit(listener.accept, KEY, TIMEOUT_S)
        assert len(stranger.recv(32)) == 32
        with closing(connect(listener.address, KEY, "the listener", TIMEOUT_S)) as link:
            link.send(Hello(7, ""))
            there, hello = accepting.result()
            there.close()
            assert hello == Hello(7, "")


def test_who_has_another_key_or_sends_back_what_came_is_turned_away(listen):
    listener = listen()
    with socket.create_connection(listener.address) as mirror, ThreadPoolExecutor(1) as pool:
        mirror.settimeout(TIMEOUT_S)
        accepting = pool.submit(listener.accept, KEY, TIMEOUT_S)
        for _ in range(2):
            mirror.sendall(mirror.recv(32))
        assert mirror.recv(32) == b""
        with pytest.raises(TransferError, match=r"^the listener does not answer at .*: it has another key$"):
            connect(listener.address, b"another", "the listener", TIMEOUT_S)
        with closing(connect(listener.address, KEY, "the listener", TIMEOUT_S)) as link:
            link.send(Hello(7, ""))
            accepting.result()[0].close()


def test_a_peer_that_does_not_answer_is_named_and_the_others_are_met(listen):
    gone, silent, there = listen(), listen(), listen()
    gone.close()
    addresses = {"the one that is gone": gone.address, "the silent one": silent.address, "the other": there.address}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(there.accept, KEY, TIMEOUT_S)
        found = list(connect_all(addresses, KEY, 2.0))
        (link,) = [each for each in found if isinstance(each, Link)]
        with closing(link):
            link.send(Hello(0, ""))
    assert link.peer == "the other"
    assert [str(each).rpartition(": ")[::2] for each in found if each is not link] == [
        (f"the one that is gone does not answer at {gone.address}", "[Errno 111] Connection refused"),
        (f"the silent one does not answer at {silent.address}", "nothing came for 2 s (refit.timeout_s)"),
    ]


def test_what_a_caller_holds_is_free_after_the_error(listen):
    closed = listen()
    closed.close()

    class Memory:
        """In place of a bucket."""

    def call():
        memory = Memory()
        held.append(weakref.ref(memory))
        with suppress(TransferError):
            connect(closed.address, KEY, "a peer", TIMEOUT_S)
            pytest.fail("a closed listener answered")

    held = []
    gc.disable()
    try:
        call()
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_listener_hears_of_the_failure_of_a_peer_that_has_come(listen):
    listener = listen()
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, KEY, TIMEOUT_S)
        with closing(connect(listener.address, KEY, "the listener", TIMEOUT_S)) as link:
            link.send(Hello(0, ""))
            with closing(accepting.result()[0]) as there:
                there.peer = "engine worker 0"
                link.send(Failure("on purpose"))
                with pytest.raises(TransferError, match=r"^engine worker 0 failed: on purpose$"):
                    listener.accept(KEY, TIMEOUT_S)


def test_a_rank_that_waits_for_peers_ends_by_the_reason_of_another_thread(listen):
    listener = listen()
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept, KEY, 60.0)
        with closing(connect(listener.address, KEY, "a peer", TIMEOUT_S)):
            listener.abort("the engine ends")
            with pytest.raises(TransferError, match=r"^the engine ends$"):
                accepting.result(TIMEOUT_S)
    with pytest.raises(TransferError, match=r"^the engine ends$"):
        listener.accept(KEY, TIMEOUT_S)
    listener.close()
    listener.abort("nobody waits any more")
