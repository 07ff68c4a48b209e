"""The process group of a refit, made by hand."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports import tcp
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megatron_ext.loopback import LOOPBACK, open_store

TIMEOUT = timedelta(seconds=10)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_gloo_listens_where_the_store_is_reached_from(host, monkeypatch):
    # The address that engines have at loopback, though others have to reach them: it is not looked at.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    store = open_store(host, TIMEOUT)
    assert tcp._own_address(store.host, store.port) in ("127.0.0.1", "::1")
    with pytest.raises(RuntimeError, match="absent0"):
        dist.ProcessGroupGloo(dist.PrefixStore("default", store), 0, 1, TIMEOUT)
    group = tcp._gloo(store, 0, 1, TIMEOUT)
    assert group.size() == 1


def test_a_rank_that_waits_at_the_store_for_another_is_told_that_it_will_not_come():
    store = open_store(LOOPBACK, TIMEOUT)
    address = store.host, store.port
    rendezvous = Rendezvous("tcp", b"key", [("", 0)], address, destinations=1, timeout_s=TIMEOUT.total_seconds())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(tcp._join, rendezvous, 0)
        while not store.check([tcp._ARRIVED]):
            time.sleep(0.01)
        tcp.TCP.abort_rendezvous(rendezvous, "engine 0 died")
        # Raised here, it would hold this frame, and so the store, until a garbage collection.
        error = waiting.exception()
    assert isinstance(error, TransferError)
    assert str(error) == "engine 0 died"


def test_a_rank_that_waits_at_the_store_for_another_gives_it_up():
    store = open_store(LOOPBACK, TIMEOUT)
    rendezvous = Rendezvous("tcp", b"key", [("", 0)], (store.host, store.port), destinations=1, timeout_s=1.0)
    with ThreadPoolExecutor() as pool:
        # See above.
        error = pool.submit(tcp._join, rendezvous, 0).exception()
    assert isinstance(error, TransferError)
    assert str(error) == "fewer than 2 ranks came to the store for 1 s (refit.timeout_s)"


LEAVE = """
import sys, time
from megarl.resharding.direct.transports import tcp
from megarl.resharding.direct.transports.endpoint import Rendezvous
tcp._abort_rendezvous(Rendezvous("tcp", b"key", [], ("127.0.0.1", int(sys.argv[1])), 1, 5.0), "rank 0 died")
time.sleep(1.6)
sys.exit(3)
"""


def test_a_store_that_is_gone_keeps_nobody_and_is_named():
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    gone = Rendezvous("tcp", b"key", [], (LOOPBACK, port), 1, 5.0)
    with pytest.raises(TransferError, match=rf"^the store at {LOOPBACK}:{port} is not reached: Connection refused$"):
        tcp._join(gone, 0)
    # torch would still be trying in a thread, whose end would be that of the process.
    left = subprocess.run([sys.executable, "-c", LEAVE, str(port)], capture_output=True, text=True)
    assert left.returncode == 3, left.stderr


def test_a_bucket_that_is_not_on_the_host_goes_by_way_of_it():
    bucket, on_host = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    wire = tcp.Wire(bucket, on_host)
    assert wire.filled(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert on_host.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    on_host.fill_(9)
    assert wire.emptied(3) is bucket
    assert bucket.tolist() == [9, 9, 9, 3, 4, 5, 6, 7]
    there = tcp.Wire.of(bucket)
    assert there.on_host is there.bucket is bucket
    assert there.filled(2).data_ptr() == bucket.data_ptr()


def test_a_rank_that_ends_while_all_connect_is_told_of():
    words = "Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:18638"
    with (
        pytest.raises(TransferError, match=r"^rendezvous rank 2 failed, as a rank is gone: Gloo"),
        tcp._errors("rendezvous", 2),
    ):
        raise RuntimeError(words)
