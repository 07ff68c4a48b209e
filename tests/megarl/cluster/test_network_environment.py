"""Environment variables that follow from the network of a node."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from converters.errors import UserError
from megarl.cluster.ray.network_environment import (
    DEFAULTS,
    ON_LOOPBACK,
    Network,
    address_of,
    look_at,
    network_environment,
)
from megarl.process.rdma_devices import RdmaPort


def values(network):
    return {default.name: default.value(network) for default in DEFAULTS}


def test_without_rdma_only_the_interface_is_said():
    said = {name: value for name, value in values(Network("eth0")).items() if value is not None}
    assert said == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_the_fastest_ports_are_those_of_the_run():
    network = Network("bond0", (RdmaPort("mlx5_0:1", 400), RdmaPort("mlx5_1:1", 400), RdmaPort("mlx5_2:1", 100)))
    assert values(network) == {
        "GLOO_SOCKET_IFNAME": "bond0",
        "NCCL_SOCKET_IFNAME": "=bond0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_IB_TIMEOUT": "22",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1,bond0",
    }


@pytest.fixture
def address(monkeypatch):
    """An address of this machine, whatever its interfaces are."""
    here = {
        "lo": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")],
        "eth7": [
            SimpleNamespace(family=socket.AF_INET6, address="fe80::1%eth7"),
            SimpleNamespace(family=socket.AF_INET, address="10.1.2.3"),
            SimpleNamespace(family=socket.AF_INET, address="10.1.2.4"),
        ],
        "ib0": [SimpleNamespace(family=socket.AF_PACKET, address="00:00:10:29")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: here)
    return "10.1.2.3"


def make_ports(root):
    (root / "dev/infiniband").mkdir(parents=True)
    for number, (state, rate) in enumerate(
        (
            ("4: ACTIVE", "400 Gb/sec (4X NDR)"),
            ("1: DOWN", "400 Gb/sec (4X NDR)"),
            ("4: ACTIVE", "2.5 Gb/sec (1X SDR)"),
            ("4: ACTIVE", "400 Gb/sec (4X NDR)"),
        )
    ):
        port = root / f"sys/class/infiniband/mlx5_{number}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
        verbs = root / f"sys/class/infiniband_verbs/uverbs{number}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"mlx5_{number}\n")
        # The last one is the host's alone.
        if number < 3:
            (root / f"dev/infiniband/uverbs{number}").touch()


def test_ports_are_read_as_the_kernel_shows_them(address, tmp_path):
    make_ports(tmp_path)
    assert look_at(address, tmp_path) == Network("eth7", (RdmaPort("mlx5_0:1", 400), RdmaPort("mlx5_2:1", 2.5)))


def test_on_loopback_nccl_stays_there(address, tmp_path):
    assert network_environment("127.0.0.1", tmp_path) == network_environment("::1", tmp_path) == ON_LOOPBACK
    make_ports(tmp_path)
    assert network_environment("127.0.0.1", tmp_path) == {"NCCL_SOCKET_IFNAME": "=lo"}
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_SOCKET_IFNAME=ib0\n")
    assert network_environment("127.0.0.1", tmp_path) == {}


def test_addresses_of_others_ask_for_nothing(address):
    assert network_environment("10.9.9.9") == {}
    assert network_environment(address)["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("file", "variables"),
    [
        ("etc/nccl.conf", {}),
        ("site/nccl", {"NCCL_CONF_FILE": "/site/nccl"}),
        ("home/user/.nccl.conf", {}),
        ("etc/ucx/ucx.conf", {}),
        ("home/other/ucx.conf", {"HOME": "/home/other"}),
        ("site/ucx.conf", {"UCX_CONFIG_DIR": "/site"}),
    ],
)
def test_what_a_site_has_set_in_a_file_of_the_library_is_left_to_it(file, variables, address, tmp_path, monkeypatch):
    for name in ("NCCL_CONF_FILE", "HOME", "UCX_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "megarl.cluster.ray.network_environment.getpwuid", lambda _user: SimpleNamespace(pw_dir="/home/user")
    )
    make_ports(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("# NCCL_SOCKET_IFNAME=ib1\n# UCX_NET_DEVICES=all\nNCCL_DEBUG=WARN\n")
    others = network_environment(address, tmp_path)
    assert others.keys() == {default.name for default in DEFAULTS}
    (tmp_path / file).write_text("NCCL_IB_HCA=mlx5_0\nNCCL_SOCKET_IFNAME=ib0\nUCX_NET_DEVICES = mlx5_0:1\n")
    for name in ["UCX_NET_DEVICES"] if file.endswith("ucx.conf") else ["NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"]:
        del others[name]
    assert network_environment(address, tmp_path) == others


def test_a_user_that_the_system_does_not_know_has_no_file_of_nccl(monkeypatch, address, tmp_path):
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    assert network_environment(address, tmp_path)["NCCL_SOCKET_IFNAME"] == "=eth7"


def test_an_interface_is_known_by_its_first_address(address):
    assert address_of("eth7") == address
    with pytest.raises(UserError, match=r"has no interface 'ib0' with an IPv4 address: .* have, of eth7$"):
        address_of("ib0")
