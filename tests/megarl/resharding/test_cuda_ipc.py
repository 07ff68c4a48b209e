"""Handles of GPU memory, without a GPU: torch maps them by its own function, into a storage that notes where."""

import pickle

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.transports.mapped import map_cuda_segment

GPUS = {0: "GPU-aaaa", 1: "GPU-bbbb", 2: "GPU-cccc"}
"""GPUs that the process that maps can see, by its own numbers."""
OWN = 2
NUMBER_THERE = 7
"""The GPU, as the process that made the memory calls it."""


class Storage(torch.UntypedStorage):
    """A storage whose GPU is noted where CUDA would map it."""

    mapped_on = ()
    fails = False

    @classmethod
    def _new_shared_cuda(cls, device, handle, size_bytes, *_counters):
        Storage.mapped_on += (device,)
        if Storage.fails:
            raise RuntimeError("CUDA error: invalid argument")
        return torch.arange(size_bytes, dtype=torch.uint8).untyped_storage()


@pytest.fixture
def gpus(monkeypatch):
    properties = {index: type("Properties", (), {"uuid": name}) for index, name in GPUS.items()}
    for name, answer in {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: OWN,
        "device_count": lambda: len(GPUS),
        "get_device_properties": properties.__getitem__,
        "can_device_access_peer": lambda own, other: (own, other) == (OWN, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(Storage, "mapped_on", ())
    monkeypatch.setattr(Storage, "fails", False)


def handle(gpu, name):
    """As `CudaSegment.handle` makes it on a GPU; `name` is that of the memory."""
    size, counter, event = torch.Size([64]), (b"counter", 0), (b"event", True)
    storage = (Storage, torch.uint8, NUMBER_THERE, name, 64, 0)
    return pickle.loads(pickle.dumps((gpu, (torch.Tensor, size, (1,), 0, *storage, False, *counter, *event))))


def test_the_arguments_are_those_that_torch_takes():
    memory, (_, arguments) = torch.zeros(1), reduce_tensor(torch.zeros(1, device="meta"))
    assert len(handle("", b"0")[1]) == rebuild_cuda_tensor.__code__.co_argcount
    assert arguments[:4] == (type(memory), memory.size(), memory.stride(), 0)


@pytest.mark.parametrize("gpu", ["GPU-cccc", "GPU-aaaa", "GPU-not-seen-here"])
def test_memory_is_mapped_on_the_gpu_of_the_process_that_maps_it(gpus, gpu):
    memory = map_cuda_segment(handle(gpu, gpu.encode()), 60)
    assert memory.tolist() == list(range(60))
    assert Storage.mapped_on == (OWN,)


def test_a_gpu_whose_memory_is_out_of_reach_is_named_before_it_is_tried(gpus):
    with pytest.raises(TransferError, match=r"GPU GPU-cccc does not reach .* GPU-bbbb .* to rdma or tcp$"):
        map_cuda_segment(handle("GPU-bbbb", b"b"), 64)
    assert Storage.mapped_on == ()


def test_memory_that_cuda_does_not_map_is_a_transfer_that_failed(gpus, monkeypatch):
    monkeypatch.setattr(Storage, "fails", True)
    with pytest.raises(TransferError, match=r"refit\.transport to rdma or tcp .*invalid argument"):
        map_cuda_segment(handle("GPU-not-seen-here", b"f"), 64)
