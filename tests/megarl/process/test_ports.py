"""Ports at which ranks meet."""

import socket
from pathlib import Path

import pytest

from converters.errors import UserError
from megarl.process import ports
from megarl.process.ports import free_port

HOST = "127.0.0.1"


def kernel_begins_at(monkeypatch, tmp_path: Path, first: int) -> None:
    """As if the kernel took the ports from `first` on for connections."""
    (tmp_path / "range").write_text(f"{first}\t65000\n")
    monkeypatch.setattr(ports, "_KERNEL_PORTS", tmp_path / "range")


def test_no_connection_takes_a_port_before_it_is_listened_on(monkeypatch, tmp_path):
    kernel_begins_at(monkeypatch, tmp_path, 20_003)
    assert {free_port() for _ in range(60)} <= {20_000, 20_001, 20_002}


def test_a_port_in_use_is_left_out(monkeypatch, tmp_path):
    kernel_begins_at(monkeypatch, tmp_path, 20_002)
    with socket.create_server((HOST, 20_000)):
        assert {free_port() for _ in range(20)} == {20_001}


def test_where_the_kernel_takes_all_ports_any_will_do(monkeypatch, tmp_path):
    kernel_begins_at(monkeypatch, tmp_path, 1024)
    port = free_port()
    with socket.create_server((HOST, port)) as server:
        assert server.getsockname()[1] == port


def test_a_given_port_is_given_back_or_refused():
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of {HOST} cannot be used .*cluster.rendezvous_port"):
            free_port(HOST, port)
    assert free_port(HOST, port) == port
