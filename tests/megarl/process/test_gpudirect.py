"""Obstacles between network cards and GPUs, as a kernel shows them."""

import pytest

from megarl.process.gpudirect import gpudirect_obstacle

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
NOT_LOADED = "nvidia_peermem is not loaded, and "


@pytest.fixture
def machine(tmp_path):
    """Makes a machine of a kernel, a driver and modules; where it lies."""

    def make(release, driver, *modules):
        (tmp_path / "proc/sys/kernel").mkdir(parents=True)
        (tmp_path / "proc/sys/kernel/osrelease").write_text(f"{release}\n")
        if driver:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
            (tmp_path / "proc/driver/nvidia/version").write_text(driver)
        for each in modules:
            (tmp_path / "sys/module" / each).mkdir(parents=True)
        return tmp_path

    return make


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem", "efa_nv_peermem"])
def test_a_module_lets_them_whatever_the_driver(machine, module):
    assert gpudirect_obstacle(machine("4.18.0", CLOSED, module)) == ""


@pytest.mark.parametrize("release", ["5.12.0", "5.15.0-1063-oracle", "6.8.0-79-generic"])
def test_so_does_the_open_driver_of_a_kernel_with_dmabuf(machine, release):
    assert gpudirect_obstacle(machine(release, OPEN)) == ""


@pytest.mark.parametrize(
    ("release", "driver", "says"),
    [
        ("6.8.0-79-generic", CLOSED, "the driver's kernel modules are not the open ones"),
        ("4.18.0-553.el8", OPEN, "Linux 4.18.0-553.el8 has no dmabuf for it"),
        ("5.11.22", OPEN, "Linux 5.11.22 has no dmabuf for it"),
        ("5.4.0-150-generic", OPEN, "Linux 5.4.0-150-generic has no dmabuf for it"),
    ],
)
def test_without_either_it_is_said_why(machine, release, driver, says):
    assert gpudirect_obstacle(machine(release, driver, "nvidia")) == NOT_LOADED + says


@pytest.mark.parametrize("release", ["6.8.0", "4.18.0"])
def test_where_no_driver_is_seen_nothing_is_said(machine, release):
    assert gpudirect_obstacle(machine(release, "")) == ""


def test_a_kernel_of_a_strange_name_is_not_called_old(machine):
    assert gpudirect_obstacle(machine("custom", OPEN)) == ""
