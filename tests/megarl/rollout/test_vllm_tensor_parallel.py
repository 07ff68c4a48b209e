import ipaddress
import os
import time

import psutil
import pytest
import torch
from engine_host import PROMPTS, Served
from eventually import eventually

from converters.layouts.traced_layout import traced_layout, untraced
from megarl.rollout.protocol import UpdateError


def _segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith("vllm_dist")}


def test_two_ranks(engines, folders, make_trainer, pool, assert_greedy):
    before = _segments()
    served = Served(engines.start(folders[0], tensor_parallel_size=2, enable_expert_parallel=True), folders)
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))
    shapes = {name: tuple(tensor.shape) for name, tensor in served.first.tensors.items()}
    traces = served.engine.trace_layout(shapes, dict.fromkeys(shapes, torch.float32))
    layout = traced_layout([trace.shard for trace in traces], shapes)
    assert layout.ranks == 2
    assert not untraced(traces)
    # Half of the experts are on the other rank.
    assert len(layout.placements(0)) == len(layout.placements(1)) < len(shapes)
    served.update(served.second, 1)
    assert_greedy(folders[1], PROMPTS[0], served.greedy(PROMPTS[0]))
    trainer = make_trainer(served.engine, folders[0])
    trainer.connect()
    trainer.load(folders[1])
    assert trainer.compare(2) == set()
    trainer.load(folders[0])
    trainer.update(2)
    assert_greedy(folders[0], PROMPTS[0], served.greedy(PROMPTS[0]))
    addresses = [
        connection.laddr.ip
        for process in engines.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert addresses
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses)
    check_that_a_dead_worker_is_noticed(served, pool)
    engines.close()
    # Segments of an engine that another test starts at this moment have a name until all its ranks have mapped them.
    assert eventually(lambda: _segments() <= before)


def check_that_a_dead_worker_is_noticed(served, pool):
    """In the middle of a transfer, when the other worker and the engine wait for it."""
    served.engine.begin_update(3, served.first.names)
    receiving = pool.submit(served.engine.receive, 3)
    time.sleep(0.3)
    processes = psutil.Process().children(recursive=True)
    next(process for process in processes if "VLLM::Worker_TP1" in " ".join(process.cmdline())).kill()
    assert isinstance(receiving.exception(60), RuntimeError)
    with pytest.raises(UpdateError, match="after update 3 failed"):
        served.engine.commit_update(3)
