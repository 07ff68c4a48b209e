"""The process group of a refit, made by hand."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from megarl.resharding.direct.transports import tcp

TIMEOUT = timedelta(seconds=10)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_gloo_listens_where_the_store_is_reached_from(host, monkeypatch):
    # The address that engines have at loopback, though others have to reach them: it is not looked at.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    store = dist.TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    assert tcp._own_address(store.host, store.port) in ("127.0.0.1", "::1")
    with pytest.raises(RuntimeError, match="absent0"):
        dist.ProcessGroupGloo(dist.PrefixStore("default", store), 0, 1, TIMEOUT)
    group = tcp._gloo(store, 0, 1, TIMEOUT)
    assert group.size() == 1
