"""One-sided reads of NIXL, between endpoints of this process."""

import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch
from played_cuda import play_cuda

from converters.errors import UserError
from megarl.process.gpudirect import GPUDIRECT
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports import nixl_agent, rdma
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.transports.rdma import RDMA
from megatron_ext import device

RENDEZVOUS = Rendezvous("rdma", b"", [], None, 1, timeout_s=20.0)
SIZE = 1000


def meet(source, destination):
    destination.connect(3, source.offer(0))
    destination.all_connected()


@pytest.fixture
def ends():
    """A source and a destination that has taken up its offer."""
    source = RDMA.send_endpoint(RENDEZVOUS, 3, SIZE)
    destination = RDMA.recv_endpoint(RENDEZVOUS, 0, SIZE, lambda: None)
    meet(source, destination)
    yield source, destination
    destination.close()
    source.close()


def test_two_reads_are_under_way_at_once(ends):
    source, destination = ends
    for version in range(3):
        for bucket in range(2):
            source.buckets[bucket].copy_(torch.arange(SIZE) + version + bucket)
        reads = [destination.pull(3, bucket, SIZE - bucket) for bucket in range(2)]
        for bucket, read in enumerate(reads):
            size = SIZE - bucket
            assert torch.equal(read()[:size], source.buckets[bucket][:size])


def test_nothing_is_read_beyond_a_bucket(ends):
    source, destination = ends
    own = torch.zeros(SIZE + 1, dtype=torch.uint8)
    agent = destination._agent
    agent.register([own])
    memory = source.offer(0).memory
    with pytest.raises(TransferError, match=r"^reading from trainer rank 3 failed: NIXL_ERR_NOT_FOUND"):
        agent.begin_reads([(own, memory.addresses[0])], memory, "trainer rank 3", "trainer rank 3")


def test_a_region_may_be_there_twice():
    # Two names for one tensor; in a process of its own, which NIXL would end.
    program = (
        "import torch; from megarl.resharding.direct.transports.nixl_agent import NixlAgent; "
        "agent, own = NixlAgent('a', is_read=True), torch.zeros(4096, dtype=torch.uint8); "
        "assert len(agent.register([own, own]).addresses) == 2; agent.close()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def seconds_of_other_threads():
    """CPU seconds of each thread but this one, of libraries too, by its number."""
    threads = psutil.Process().threads()
    return {each.id: each.user_time + each.system_time for each in threads if each.id != threading.get_native_id()}


@pytest.mark.usefixtures("ends")
def test_a_rank_between_two_refits_computes_nothing():
    began, before = time.monotonic(), seconds_of_other_threads()
    time.sleep(0.5)
    after, passed = seconds_of_other_threads(), time.monotonic() - began
    # The thread of an agent that NIXL's own class makes would take all that this process gets.
    assert max(seconds - before.get(thread, 0.0) for thread, seconds in after.items()) < 0.1 * passed


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ())
    with pytest.raises(
        UserError,
        match=rf"^refit\.transport=rdma needs NIXL, .* for {sys.executable}: pip install nixl-cu12, .* or tcp$",
    ):
        RDMA.send_endpoint(RENDEZVOUS, 0, SIZE)


def test_of_two_packages_that_for_the_cuda_of_torch_is_taken(monkeypatch):
    monkeypatch.setattr(nixl_agent, "find_spec", lambda name: name)
    monkeypatch.setattr(device, "cuda_version", lambda: "13.0")
    assert nixl_agent._package() == "nixl_cu13"
    monkeypatch.setattr(device, "cuda_version", lambda: "")
    assert nixl_agent._package() == "nixl_cu12"
    monkeypatch.setattr(nixl_agent, "find_spec", lambda name: None)
    assert nixl_agent._package() is None


@pytest.fixture
def engine_config(monkeypatch):
    """The configuration of UCX of each agent that is made."""
    found = []
    create = nixl_agent._create_agent

    def note(nixl, name, ucx, **options):
        found.append(ucx)
        return create(nixl, name, ucx, **options)

    monkeypatch.setattr(nixl_agent, "_create_agent", note)
    return found


@pytest.mark.parametrize(("has_ports", "backend"), [(True, "nccl"), (True, "gloo"), (False, "nccl")])
def test_software_stands_in_for_hardware_where_there_are_no_ports_or_no_gpus(
    monkeypatch, engine_config, has_ports, backend
):
    monkeypatch.setattr(device, "backend", lambda: backend)
    rendezvous = replace(RENDEZVOUS, by_hardware=has_ports)
    source, destination = RDMA.send_endpoint(rendezvous, 3, SIZE), RDMA.recv_endpoint(rendezvous, 0, SIZE, list)
    refused = ["PROTO_EMULATION_ENABLE=n", "IB_TX_INLINE_RESP=0"] if (has_ports, backend) == (True, "nccl") else []
    assert [list(ucx) for ucx in engine_config] == [["TCP_TX_SEG_SIZE=512k", "TCP_RX_SEG_SIZE=512k", *refused]] * 2
    # Memory of the host has a way without software here.
    meet(source, destination)
    destination.close()
    source.close()


@pytest.fixture
def by_hardware_alone(monkeypatch):
    """A rendezvous at which ranks refuse software, and nothing but sockets, which always are software, is there."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(device, "backend", lambda: "nccl")
    return replace(RENDEZVOUS, by_hardware=True)


@pytest.mark.parametrize(
    ("obstacle", "says"),
    [
        (
            "nvidia_peermem is not loaded",
            f"network cards do not reach the memory of GPUs here: nvidia_peermem is not loaded; {GPUDIRECT}, or ",
        ),
        # Anything may be wrong then, and modules of the kernel are not blamed.
        ("", "no network card reads from there by itself; look at the ports of both machines and the fabric between "),
    ],
)
def test_memory_that_no_hardware_reaches_is_told_of_when_ranks_meet(monkeypatch, by_hardware_alone, obstacle, says):
    monkeypatch.setattr(rdma, "gpudirect_obstacle", lambda: obstacle)
    source = RDMA.send_endpoint(by_hardware_alone, 3, SIZE)
    destination = RDMA.recv_endpoint(by_hardware_alone, 0, SIZE, lambda: None)
    with pytest.raises(TransferError) as error:
        meet(source, destination)
    said = str(error.value)
    assert said.startswith(f"reading from trainer rank 3 failed: NIXL_ERR_REMOTE_DISCONNECT: {says}")
    assert said.endswith(", or set refit.transport=tcp")
    assert ("UCX_TLS" in said, "UCX_PROTO_EMULATION_ENABLE=y" in said) == (not obstacle, not obstacle)
    destination.close()
    source.close()


def test_software_may_copy_where_the_environment_says_so(monkeypatch, by_hardware_alone):
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
    source = RDMA.send_endpoint(by_hardware_alone, 3, SIZE)
    destination = RDMA.recv_endpoint(by_hardware_alone, 0, SIZE, lambda: None)
    meet(source, destination)
    source.buckets[0].copy_(torch.arange(SIZE))
    read = destination.pull(3, 0, SIZE)
    assert torch.equal(read()[:SIZE], source.buckets[0][:SIZE])
    destination.close()
    source.close()


def test_a_source_that_is_gone_is_not_taken_for_one_out_of_reach(by_hardware_alone):
    def check():
        raise TransferError("trainer rank 3 is gone")

    source = RDMA.send_endpoint(by_hardware_alone, 3, SIZE)
    destination = RDMA.recv_endpoint(by_hardware_alone, 0, SIZE, check)
    with pytest.raises(TransferError, match=r"^trainer rank 3 is gone$"):
        meet(source, destination)
    destination.close()
    source.close()


MIB = 2**20


@pytest.mark.parametrize(("of_source", "own", "first"), [(9, 9, 4), (2, 9, 2), (9, 3, 3)])
def test_the_first_read_is_as_long_as_a_message_and_inside_both_buckets(of_source, own, first):
    source = RDMA.send_endpoint(RENDEZVOUS, 3, of_source * MIB)
    destination = RDMA.recv_endpoint(RENDEZVOUS, 0, own * MIB, lambda: None)
    source.buckets[0].fill_(1)
    meet(source, destination)
    assert destination._buckets[0].sum(dtype=torch.int64).item() == first * MIB
    destination.close()
    source.close()


def test_buckets_of_a_gpu_are_freed_at_the_end_and_after_a_failure(monkeypatch):
    cuda = play_cuda(monkeypatch.setattr)
    source, destination = RDMA.send_endpoint(RENDEZVOUS, 3, SIZE), RDMA.recv_endpoint(RENDEZVOUS, 0, SIZE, list)
    assert len(cuda.allocated) == 4
    destination.close()
    source.close()
    assert cuda.allocated == {}
    monkeypatch.setattr(nixl_agent.NixlAgent, "register", lambda *_: 1 / 0)
    for make in (
        lambda: RDMA.send_endpoint(RENDEZVOUS, 3, SIZE),
        lambda: RDMA.recv_endpoint(RENDEZVOUS, 0, SIZE, list),
    ):
        with pytest.raises(ZeroDivisionError):
            make()
        assert cuda.allocated == {}
