import ipaddress
import os

import psutil
from engine_host import PROMPTS, Served


def _segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith(("megarl-", "vllm_dist"))}


def test_two_ranks(engines, folders, assert_greedy):
    before = _segments()
    served = Served(engines.start(folders[0], tensor_parallel_size=2, enable_expert_parallel=True), folders)
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))
    served.update(served.second, 1)
    assert_greedy(folders[1], PROMPTS[0], served.greedy(PROMPTS[0]))
    addresses = [
        connection.laddr.ip
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert addresses
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses)
    engines.close()
    assert _segments() <= before
