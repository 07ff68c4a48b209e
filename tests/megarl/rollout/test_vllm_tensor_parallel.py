import ipaddress
import os

import psutil
import torch
from engine_host import PROMPTS, Served

from converters.layouts.recorded import recorded_layout, unrecorded


def _segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith(("megarl-", "vllm_dist"))}


def test_two_ranks(engines, folders, assert_greedy):
    before = _segments()
    served = Served(engines.start(folders[0], tensor_parallel_size=2, enable_expert_parallel=True), folders)
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))
    shapes = {name: tuple(tensor.shape) for name, tensor in served.first.tensors.items()}
    recordings = served.engine.record_layout(shapes, dict.fromkeys(shapes, torch.float32))
    layout = recorded_layout([recording.shard for recording in recordings], shapes)
    assert layout.ranks == 2
    assert not unrecorded(recordings)
    # Half of the experts are on the other rank.
    assert len(layout.placements(0)) == len(layout.placements(1)) < len(shapes)
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
