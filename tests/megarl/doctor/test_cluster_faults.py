"""Faults that follow from what was measured of a cluster, one at a time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.doctor.cluster_check import rounds
from megarl.doctor.cluster_faults import find_faults
from megarl.doctor.compilers import Compilers
from megarl.doctor.limits import Limits
from megarl.doctor.node_probe import Compute, Link, Node
from megarl.doctor.slow_links import SLOW
from megarl.process.rdma_devices import RdmaPort

GIB = 1024**3
GPUS = [Compute(f"cuda:{index}", "H200", 136 * GIB, 139 * GIB, 700.0, is_right=True) for index in range(2)]
NAMES = ("n1", "n2", "n3", "n4")
NODES = [
    Node(name, f"10.0.0.{place}", {"torch": "2.13.0", "ray": "2.60.0"}, GPUS, (RdmaPort("mlx5_0:1", 400),))
    for place, name in enumerate(NAMES)
]
LINKS = [Link(one, other, 5.0, 0.0001) for one in NAMES for other in NAMES if one != other]


def with_second(**changes):
    return [replace(node, **changes) if node.name == "n2" else node for node in NODES]


def with_second_gpu(**changes):
    return with_second(compute=[GPUS[0], replace(GPUS[1], **changes)])


def test_a_sound_cluster_has_no_faults():
    assert find_faults(NODES, LINKS) == []
    assert find_faults(NODES[:2], [link for link in LINKS if {link.sender, link.receiver} == {"n1", "n2"}]) == []
    assert find_faults(NODES[:1], []) == []


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        (with_second_gpu(is_right=False), "cuda:1 multiplies matrices wrongly"),
        (
            with_second_gpu(failure="CUDA error: no", tflops=0.0, free_memory_bytes=0, is_right=False),
            "cuda:1 computes nothing (CUDA error: no)",
        ),
        (with_second_gpu(tflops=400.0), "cuda:1 multiplies at 400 TFLOP/s, the others at 700"),
        (with_second_gpu(free_memory_bytes=20 * GIB), "cuda:1 has 20 of 139 GiB free"),
        (with_second(compute=GPUS[:1]), "it has 1 x H200, the others 2 x H200"),
        (with_second(versions={"torch": "2.12.0", "ray": "2.60.0"}), "torch 2.12.0 is installed, and 2.13.0 elsewhere"),
        (with_second(versions={"ray": "2.60.0"}), "torch is not installed, and 2.13.0 elsewhere"),
        (with_second(ports=()), "its InfiniBand ports that are up are none, elsewhere 1 of 400 Gbit/s"),
        (with_second(ports=(RdmaPort("mlx5_0:1", 100),)), "ports that are up are 1 of 100 Gbit/s, elsewhere"),
        (with_second(clock_offset_s=-90.0), "its clock is 90.0 s behind the others"),
        (
            with_second(limits=Limits(8 * 1024**2)),
            "it has InfiniBand, for which a process may lock no more than 8 MiB",
        ),
        (with_second(has_verbs=False), "it has InfiniBand and no libibverbs, without which NCCL goes over sockets"),
        (with_second(gpudirect_obstacle="no module"), "its InfiniBand cannot reach the memory of GPUs: no module"),
        (
            with_second(compilers=Compilers(("/usr/include/python3.12/Python.h",))),
            "Triton can compile nothing there with",
        ),
        (with_second(compilers=Compilers(has_nvcc=False)), "it has no nvcc, and others have: engines take other kern"),
        (with_second(limits=Limits(open_files=1024)), "may have no more than 1024 files open"),
        (
            with_second(shared_memory_bytes=64 * 1024**2),
            "64 MiB of /dev/shm are free there, for NCCL and Ray's objects",
        ),
        (with_second(unseen_folders=("/data",)), "it does not see what n1 writes into /data"),
        (with_second(unseen_inputs=("/models/policy",)), "it does not see /models/policy"),
    ],
)
def test_the_node_with_the_fault_is_named(nodes, says):
    (fault,) = find_faults(nodes, LINKS)
    assert fault.node == "n2"
    assert says in fault.what


def test_memory_that_an_earlier_job_holds_on_all_nodes_is_told_of():
    held = [replace(node, compute=[replace(each, free_memory_bytes=60 * GIB) for each in GPUS]) for node in NODES]
    faults = find_faults(held, LINKS)
    assert [(fault.node, fault.what) for fault in faults[:2]] == [
        ("n1", "cuda:0 has 60 of 139 GiB free"),
        ("n1", "cuda:1 has 60 of 139 GiB free"),
    ]
    assert len(faults) == len(NODES) * len(GPUS)
    assert all(fault.refuses for fault in faults)


def test_memory_and_a_library_are_for_infiniband_alone():
    nodes = [replace(node, ports=(), limits=Limits(65536), has_verbs=False, gpudirect_obstacle="no") for node in NODES]
    assert find_faults(nodes, LINKS) == []


def test_infiniband_that_no_node_can_use_is_one_warning():
    """As in containers without /dev/infiniband, where no node differs from the rest."""
    nodes = [replace(node, ports=(), ports_obstacle="mlx5_0 cannot be opened") for node in NODES]
    (fault,) = find_faults(nodes, LINKS)
    assert (fault.node, fault.refuses) == ("n1", False)
    assert fault.what == "neither it nor another node can use InfiniBand: mlx5_0 cannot be opened"


def test_compilers_are_for_gpus_alone_and_nvcc_is_one_warning_where_no_node_has_it():
    lean = [replace(node, compilers=Compilers(has_nvcc=False)) for node in NODES]
    (fault,) = find_faults(lean, LINKS)
    assert fault.what.startswith("neither it nor another node with GPUs has nvcc")
    assert not fault.refuses
    cpu = [Compute("cpu", "x86_64", 16 * GIB, 64 * GIB, 1.0, is_right=True)]
    for compute in (cpu, []):
        bare = [replace(node, compute=compute, compilers=Compilers(("gcc",), has_nvcc=False)) for node in NODES]
        assert find_faults(bare, LINKS) == []


def test_a_node_in_use_is_not_compared():
    assert find_faults(with_second(compute=[]), LINKS) == []


@pytest.mark.parametrize(
    ("ends", "how"),
    [(("sender", "receiver"), "go to and from"), (("sender",), "go to"), (("receiver",), "come from")],
)
def test_a_node_with_slow_ways_is_named_for_all_of_them(ends, how):
    links = [replace(link, gbyte_per_s=1.0) if "n3" in [getattr(link, end) for end in ends] else link for link in LINKS]
    (fault,) = find_faults(NODES, links)
    assert (fault.node, fault.what) == ("n3", f"1 GB/s {how} other nodes, between those 5")
    assert fault.refuses


@pytest.mark.parametrize(
    ("change", "says", "refuses"),
    [
        ({"gbyte_per_s": 1.0}, "1 GB/s go to n2, between others 5", False),
        ({"latency_s": 0.02}, "a message to n2 and back takes 20.0 ms, usually 0.10", True),
        ({"failure": "10.0.0.2:4000: timed out"}, "no connection to n2 (10.0.0.2:4000: timed out)", True),
    ],
)
def test_a_way_between_two_nodes_is_named_by_both(change, says, refuses):
    links = [replace(link, **change) if (link.sender, link.receiver) == ("n1", "n2") else link for link in LINKS]
    (fault,) = find_faults(NODES, links)
    assert fault.node == "n1"
    assert says in fault.what
    assert fault.refuses == refuses


@given(st.lists(st.floats(SLOW * 700 + 1, 700), min_size=2, max_size=8))
def test_what_differs_little_is_no_fault(rates):
    nodes = [
        replace(NODES[0], name=f"n{place}", compute=[replace(GPUS[0], tflops=rate)]) for place, rate in enumerate(rates)
    ]
    assert find_faults(nodes, []) == []


@given(st.integers(2, 12))
def test_all_pairs_meet_once_and_nobody_is_in_two_of_a_round(count):
    met = list(rounds(count))
    for pairs in met:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    pairs = sorted(tuple(sorted(pair)) for each in met for pair in each)
    assert pairs == [(one, other) for one in range(count) for other in range(one + 1, count)]
