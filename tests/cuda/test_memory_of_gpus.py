"""Memory of one GPU, mapped by another process on its own."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from gpus import needs_gpus

from megarl.resharding.direct.transports.mapped import CudaSegment, map_cuda_segment
from megatron_ext import device

pytestmark = [pytest.mark.cuda, needs_gpus(1)]


def read_and_add(handle, size_bytes, index):
    """Where torch has the mapped memory and its sum there, as GPU `index` of this process sees it; adds 1 to all."""
    torch.cuda.set_device(index)
    memory = map_cuda_segment(handle, size_bytes)
    same = torch.equal(memory, torch.arange(size_bytes, dtype=torch.uint8, device="cuda"))
    memory.add_(1)
    device.synchronize()
    found = memory.device.index, same
    del memory
    return found


def shared_with(index, visible=None):
    segment = CudaSegment(200)
    segment.memory.copy_(torch.arange(200, dtype=torch.uint8))
    device.synchronize()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(read_and_add, segment.handle(), 200, index).result(120)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    return found, segment.memory.cpu()


def test_a_process_on_the_same_gpu_reads_and_writes():
    found, memory = shared_with(0)
    assert found == (0, True)
    assert torch.equal(memory, torch.arange(1, 201, dtype=torch.uint8))


@needs_gpus(2)
@pytest.mark.parametrize("visible", [None, "1"], ids=["sees both", "sees its own alone"])
def test_a_process_on_another_gpu_maps_it_on_its_own(visible):
    if visible and os.environ.get("CUDA_VISIBLE_DEVICES"):
        pytest.skip("CUDA_VISIBLE_DEVICES is set already, so that number 1 may be another GPU")
    index = 0 if visible else 1
    found, memory = shared_with(index, visible)
    assert found == (index, True)
    assert torch.equal(memory, torch.arange(1, 201, dtype=torch.uint8))


def test_a_side_stream_waits_for_itself_alone():
    side, busy = device.SideStream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
    with side.entered():
        done = torch.ones(10, device="cuda").sum()
        side.synchronize()
        assert done.item() == 10
    assert not busy.query(), "the whole device was waited for"
    device.synchronize()
    assert busy.query()
