"""A rendezvous at a loopback address is not reachable from other machines."""

import os
import socket
from typing import TypeAlias

import psutil
import pytest
import torch
from launch import run_ranks

from converters.layouts.megatron import ParallelSizes
from megarl.process.ports import free_port
from megatron_ext import parallel
from megatron_ext.loopback import listen_on_loopback

Listener: TypeAlias = tuple[str, int]


def listeners() -> set[Listener]:
    connections = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def listening_addresses(rank: int, sizes: ParallelSizes) -> tuple[set[Listener], float]:
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return listeners(), float(total)


def listening_addresses_by_name(rank: int, sizes: ParallelSizes, port: int) -> tuple[set[Listener], float]:
    parallel.shutdown()
    del os.environ["GLOO_SOCKET_IFNAME"]
    parallel.initialize(sizes, rank, f"tcp://localhost:{port}")
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    return listening_addresses(rank, sizes)


@pytest.mark.parametrize("case", [(listening_addresses,), (listening_addresses_by_name, free_port())])
def test_ranks_of_one_machine_listen_on_loopback_only(case):
    function, *arguments = case
    # Ranks are forked from this process, and have what listens here.
    inherited = listeners()
    results = run_ranks(function, ParallelSizes(world_size=2), *arguments)
    assert [total for _, total in results] == [2.0, 2.0]
    addresses = {address for found, _ in results for address, _port in found - inherited}
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_port_in_use_is_an_error():
    listen_on_loopback()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{taken.getsockname()[1]}", rank=0, world_size=1
        )
