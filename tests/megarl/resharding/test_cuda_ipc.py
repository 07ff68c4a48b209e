"""Segments of GPU memory, without a GPU: shared memory plays CUDA's runtime, and torch names GPUs that are absent."""

import pickle

import pytest
import torch
from played_cuda import MAP_FAILED, NOT_SUPPORTED, OUT_OF_MEMORY, play_cuda

from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.transports.mapped import CUDA_IPC, CudaSegment, MappedCudaSegment
from megatron_ext import device

GPUS = {0: "GPU-aaaa", 1: "GPU-bbbb", 2: "GPU-cccc"}
"""GPUs that the process that maps can see, by its own numbers."""
OWN = 2
SIZE = 60
RENDEZVOUS = Rendezvous("cuda_ipc", b"", [], None, 1, timeout_s=20.0)
real_uuid, real_reaches = device.uuid, device.reaches


@pytest.fixture
def cuda(monkeypatch):
    """Played memory, which this process takes for that of another one when it maps it."""
    played = play_cuda(monkeypatch.setattr)
    played.maps_own = True
    properties = {index: type("Properties", (), {"uuid": name}) for index, name in GPUS.items()}
    for name, answer in {
        "current_device": lambda: OWN,
        "device_count": lambda: len(GPUS),
        "get_device_properties": properties.__getitem__,
        "can_device_access_peer": lambda own, other: (own, other) == (OWN, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(device, "uuid", real_uuid)
    monkeypatch.setattr(device, "reaches", real_reaches)
    return played


@pytest.fixture
def segment(cuda):
    made = CudaSegment(SIZE)
    made.memory.copy_(torch.arange(SIZE, dtype=torch.uint8))
    yield made
    made.close()
    assert cuda.allocated == {}


@pytest.mark.parametrize("gpu", ["GPU-cccc", "GPU-aaaa", "GPU-not-seen-here"])
def test_memory_of_any_gpu_that_may_be_reached_is_mapped(cuda, segment, gpu):
    _, there = pickle.loads(pickle.dumps(segment.handle()))
    mapped = MappedCudaSegment((gpu, there), SIZE)
    assert mapped.memory.tolist() == list(range(SIZE))
    mapped.close()
    assert cuda.opened == {}


def test_a_gpu_whose_memory_is_out_of_reach_is_named_before_it_is_tried(cuda, segment):
    with pytest.raises(
        TransferError, match=r"^GPU GPU-cccc does not map .* GPU-bbbb \(they are no peers\): .* or tcp do"
    ):
        MappedCudaSegment(("GPU-bbbb", segment.handle()[1]), SIZE)
    assert "cudaIpcOpenMemHandle" not in cuda.calls


def test_the_reason_of_cuda_for_mapping_nothing_is_said(cuda, segment):
    cuda.refusals["cudaIpcOpenMemHandle"] = [MAP_FAILED]
    with pytest.raises(TransferError, match=r"GPU-cccc \(cudaErrorMapBufferObjectFailed, mapping of .*PID namespace;"):
        MappedCudaSegment(segment.handle(), SIZE)


def test_the_reason_of_cuda_for_sharing_nothing_is_said(cuda, segment):
    cuda.refusals["cudaIpcGetMemHandle"] = [NOT_SUPPORTED]
    with pytest.raises(
        TransferError,
        match=r"^GPU GPU-cccc does not share .* \(cudaErrorNotSupported, operation not supported\), as .* or tcp do ",
    ):
        segment.handle()


def test_buckets_stay_when_all_have_mapped_them_and_end_when_both_ends_close(cuda):
    source = CUDA_IPC.send_endpoint(RENDEZVOUS, 0, SIZE)
    destinations = [CUDA_IPC.recv_endpoint(RENDEZVOUS, rank, SIZE, lambda: None) for rank in range(2)]
    for rank, destination in enumerate(destinations):
        destination.connect(0, source.offer(rank))
        destination.all_connected()
    source.all_connected()
    source.buckets[1].fill_(7)
    assert [end.pull(0, 1, SIZE)()[SIZE - 1].item() for end in destinations] == [7, 7]
    assert (len(cuda.allocated), [count for _, _, count in cuda.opened.values()]) == (2, [2, 2])
    destinations[0].close()
    assert [count for _, _, count in cuda.opened.values()] == [1, 1]
    destinations[1].close()
    source.close()
    assert (cuda.opened, cuda.allocated) == ({}, {})


def test_an_end_that_maps_but_one_of_two_buckets_closes_that(cuda):
    source = CUDA_IPC.send_endpoint(RENDEZVOUS, 0, SIZE)
    destination = CUDA_IPC.recv_endpoint(RENDEZVOUS, 0, SIZE, lambda: None)
    cuda.refusals["cudaIpcOpenMemHandle"] = [0, MAP_FAILED]
    with pytest.raises(TransferError, match="mapping of buffer object failed"):
        destination.connect(0, source.offer(0))
    destination.close()
    source.close()
    assert (cuda.opened, cuda.allocated) == ({}, {})


def test_a_full_gpu_is_told_of_in_one_sentence_and_nothing_stays(cuda):
    cuda.refusals["cudaMalloc"] = [0, OUT_OF_MEMORY, OUT_OF_MEMORY]
    with pytest.raises(
        TransferError,
        match=r"^GPU GPU-cccc has no memory for a bucket of 60 bytes \(cudaErrorMemoryAllocation, out of memory: 1,000 "
        r"of 80,000 bytes are free\): if it is full, lower refit\.bucket_bytes, or the share of .* its engine takes$",
    ):
        CUDA_IPC.send_endpoint(RENDEZVOUS, 0, SIZE)
    assert cuda.allocated == {}
