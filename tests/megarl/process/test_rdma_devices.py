"""Devices of RDMA as a kernel shows them, in a container that was given some of its host's."""

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.process.rdma_devices import RdmaPort, active_ports, ports_obstacle, rdma_devices
from megarl.resharding.direct.transports.nixl_agent import has_port


@pytest.fixture
def root(tmp_path):
    """A host that has mlx5_0 to mlx5_2, in a container with no device."""
    for number in range(3):
        verbs = tmp_path / f"sys/class/infiniband_verbs/uverbs{number}"
        verbs.mkdir(parents=True)
        # The numbers of the files are not always those of the devices.
        (verbs / "ibdev").write_text(f"mlx5_{2 - number}\n")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    return tmp_path


def test_a_machine_without_any_has_none(tmp_path):
    assert rdma_devices(tmp_path) == set()
    assert ports_obstacle(tmp_path) == ""


def test_devices_of_the_host_alone_do_not_count(root):
    assert rdma_devices(root) == set()


def test_a_machine_whose_devices_are_all_closed_is_told_of_until_one_port_can_be_used(root):
    assert ports_obstacle(root) == "mlx5_0, mlx5_1, mlx5_2 cannot be opened in /dev/infiniband"
    give_port(root, "mlx5_1", 1, "4: ACTIVE")
    assert ports_obstacle(root) == ""


def test_one_counts_whose_file_can_be_opened(root):
    (root / "dev/infiniband/uverbs0").touch()
    # As one that the container may not use: it is there, and opening it fails.
    (root / "dev/infiniband/uverbs1").mkdir()
    assert rdma_devices(root) == {"mlx5_2"}


def give_port(root, device, number, state):
    """A port of a device that the container was given."""
    for verbs in (root / "sys/class/infiniband_verbs").iterdir():
        if (verbs / "ibdev").read_text().strip() == device:
            (root / "dev/infiniband" / verbs.name).touch()
    port = root / f"sys/class/infiniband/{device}/ports/{number}"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", "5: ACTIVE_DEFER"])
def test_a_port_that_is_not_up_is_none(root, state):
    give_port(root, "mlx5_0", 1, state)
    assert rdma_devices(root) == {"mlx5_0"}
    assert active_ports(root) == ()
    assert ports_obstacle(root) == "no port of mlx5_0 is up"
    assert not has_port(root)


def test_one_that_is_up_suffices(root):
    give_port(root, "mlx5_0", 1, "1: DOWN")
    give_port(root, "mlx5_0", 2, "4: ACTIVE")
    assert active_ports(root) == (RdmaPort("mlx5_0:2", 400),)
    assert has_port(root)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_library_is_found_by_the_name_by_which_nccl_opens_it(tmp_path, is_there):
    if is_there:
        # Any library will do: it is opened, and nothing of it is called.
        ctypes.CDLL("libm.so.6")
        mapped = Path("/proc/self/maps").read_text().split()
        shutil.copy(next(each for each in mapped if "/libm.so" in each), tmp_path / "libibverbs.so.1")
    program = "from megarl.process.rdma_devices import has_verbs; print(has_verbs())"
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    said = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    is_installed = ctypes.util.find_library("ibverbs") is not None
    assert said.stdout.strip() == str(is_there or is_installed)
