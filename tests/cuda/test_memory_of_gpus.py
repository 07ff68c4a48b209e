"""Memory of one GPU, mapped by another process on its own."""

import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from gpus import needs_gpus

from megarl.resharding.direct.transports.mapped import CudaSegment, MappedCudaSegment
from megatron_ext import device

pytestmark = [pytest.mark.cuda, needs_gpus(1)]


def read_and_add(handle, size_bytes, index):
    """Where torch has the mapped memory and its sum there, as GPU `index` of this process sees it; adds 1 to all."""
    torch.cuda.set_device(index)
    mapped = MappedCudaSegment(handle, size_bytes)
    same = torch.equal(mapped.memory, torch.arange(size_bytes, dtype=torch.uint8, device="cuda"))
    mapped.memory.add_(1)
    found = mapped.memory.device.index, same
    mapped.close()
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
    memory = segment.memory.cpu()
    segment.close()
    return found, memory


MIB = 2**20
SIZE = 256 * MIB


def own(connection, size_bytes):
    """Share memory whose bytes are 1 with whoever reads; the sum when it has, and what is free before, then, after."""
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    free = [torch.cuda.mem_get_info()[0]]
    segment = CudaSegment(size_bytes)
    segment.memory.fill_(1)
    device.synchronize()
    free.append(torch.cuda.mem_get_info()[0])
    connection.send(segment.handle())
    connection.recv()
    total = segment.memory.sum(dtype=torch.int64).item()
    segment.close()
    time.sleep(1.0)
    free.append(torch.cuda.mem_get_info()[0])
    connection.send((total, free))


def read(connection, handle, size_bytes):
    """Add 1 to the memory, say so, and keep it."""
    torch.cuda.set_device(0)
    mapped = MappedCudaSegment(handle, size_bytes)
    mapped.memory.add_(1)
    device.synchronize()
    connection.send(torch.cuda.memory.get_allocator_backend())
    connection.recv()
    mapped.close()


@pytest.mark.parametrize("is_killed", [False, True], ids=["a receiver that closes", "a receiver that is killed"])
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_memory_is_shared_and_given_back_whatever_torchs_allocator_is_set_to(monkeypatch, settings, is_killed):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    spawn = get_context("spawn")
    (here, there), (mine, theirs) = spawn.Pipe(), spawn.Pipe()
    owner = spawn.Process(target=own, args=(there, SIZE))
    owner.start()
    assert here.poll(120)
    reader = spawn.Process(target=read, args=(theirs, here.recv(), SIZE))
    reader.start()
    assert mine.poll(120)
    mine.recv()
    if is_killed:
        os.kill(reader.pid, signal.SIGKILL)
    else:
        mine.send("close")
    reader.join(60)
    here.send("close")
    assert here.poll(120)
    total, (before, during, after) = here.recv()
    owner.join(60)
    assert total == 2 * SIZE
    assert before - during >= SIZE
    # Nothing else is on this GPU while the test runs but what other processes hold all the time.
    assert before - after < SIZE // 2


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
