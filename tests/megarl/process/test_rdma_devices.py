"""Devices of RDMA as a kernel shows them, in a container that was given some of its host's."""

import pytest

from megarl.process.rdma_devices import rdma_devices


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


def test_devices_of_the_host_alone_do_not_count(root):
    assert rdma_devices(root) == set()


def test_one_counts_whose_file_can_be_opened(root):
    (root / "dev/infiniband/uverbs0").touch()
    # As one that the container may not use: it is there, and opening it fails.
    (root / "dev/infiniband/uverbs1").mkdir()
    assert rdma_devices(root) == {"mlx5_2"}
