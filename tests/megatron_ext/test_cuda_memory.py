"""Memory of a GPU past torch's allocator, with a runtime that shared memory plays."""

import ctypes
import struct
from multiprocessing import get_context

import pytest
import torch
from played_cuda import INVALID_DEVICE_CONTEXT, MAP_FAILED, OUT_OF_MEMORY, play_cuda

from megatron_ext import cuda_memory, device
from megatron_ext.cuda_memory import CudaMemoryError, MappedMemory, OwnMemory
from megatron_ext.tensor_at import tensor_at


@pytest.fixture
def cuda(monkeypatch):
    return play_cuda(monkeypatch.setattr)


def test_a_tensor_over_foreign_memory_copies_nothing():
    memory = (ctypes.c_uint8 * 64)(*range(64))
    whole = tensor_at(ctypes.addressof(memory), 60, torch.device("cpu"))
    assert (whole.data_ptr(), whole.dtype, whole.tolist()) == (ctypes.addressof(memory), torch.uint8, list(range(60)))
    part = whole[8:16].view(torch.int32)
    del whole
    part.zero_()
    assert list(memory[6:18]) == [6, 7, *[0] * 8, 16, 17]


def test_a_tensor_is_on_the_gpu_that_is_named_and_torch_asks_nobody(monkeypatch):
    found, pointer_of = [], ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    monkeypatch.setattr(torch, "from_dlpack", lambda capsule: found.append(pointer_of(capsule, b"dltensor")))
    tensor_at(2**40, 60, torch.device("cuda", 3))
    address, kind, index = struct.unpack("=Qii", ctypes.string_at(found[0], 16))
    # Devices of CUDA are the second kind of DLPack's.
    assert (address, kind, index) == (2**40, 2, 3)


def test_an_error_that_ends_a_tensor_over_foreign_memory_stays_what_it_was():
    memory = (ctypes.c_uint8 * 64)()

    def fail():
        view = tensor_at(ctypes.addressof(memory), 60, torch.device("cpu"))[:9]
        raise KeyError(len(view))

    with pytest.raises(KeyError, match="9"):
        [fail() for _ in range(2)]


def test_memory_is_zero_and_has_a_piece_of_its_own(cuda):
    own = OwnMemory(100)
    assert own.tensor.tolist() == [0] * 100
    ((_, size),) = cuda.allocated.values()
    assert size == 2**21
    own.close()
    assert cuda.allocated == {}
    own.close()
    assert cuda.calls.count("cudaFree") == 1


def test_memory_that_nobody_closes_ends_with_its_owner(cuda):
    own = OwnMemory(100)
    assert len(cuda.allocated) == 1
    del own
    assert cuda.allocated == {}


def test_on_a_cpu_it_is_torchs_own(monkeypatch):
    monkeypatch.setattr(cuda_memory, "runtime", None)
    own = OwnMemory(100)
    assert own.tensor.tolist() == [0] * 100
    own.close()


def test_a_full_gpu_is_asked_again_when_torch_has_given_back_what_it_keeps(cuda, monkeypatch):
    emptied = []
    monkeypatch.setattr(device, "empty_cache", lambda: emptied.append(list(cuda.calls)))
    cuda.refusals["cudaMalloc"] = [OUT_OF_MEMORY]
    own = OwnMemory(100)
    assert [calls.count("cudaMalloc") for calls in emptied] == [1]
    # Left there, torch would report it as the error of its next launch.
    assert cuda.last_error == 0
    own.close()
    cuda.refusals["cudaMalloc"] = [OUT_OF_MEMORY] * 2
    with pytest.raises(CudaMemoryError, match=r"^cudaErrorMemoryAllocation, out of memory: 1,000 of 80,000 bytes are"):
        OwnMemory(100)
    assert len(emptied) == 2
    assert (cuda.last_error, cuda.allocated) == (0, {})


def test_what_is_no_lack_of_memory_is_not_asked_again(cuda, monkeypatch):
    monkeypatch.setattr(device, "empty_cache", pytest.fail)
    cuda.refusals["cudaMalloc"] = [INVALID_DEVICE_CONTEXT]
    with pytest.raises(CudaMemoryError, match=r"^cudaErrorDeviceUninitialized, invalid device context$"):
        OwnMemory(100)


def _write(handle, size_bytes, times):
    """Open a handle so often, add 1 to the memory each time, and close it: what was open and is in the end."""
    cuda = play_cuda()
    mapped = [MappedMemory(handle, size_bytes) for _ in range(times)]
    addresses = {each.tensor.data_ptr() for each in mapped}
    for each in mapped:
        each.tensor.add_(1)
    opened = [count for _, _, count in cuda.opened.values()]
    for each in mapped[:-1]:
        each.close()
    mapped[-1].tensor.add_(1)
    mapped[-1].close()
    return len(addresses), opened, cuda.opened


def test_another_process_maps_it_as_often_as_it_likes(cuda):
    own = OwnMemory(100)
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(_write, (own.handle(), 100, 3)) == (1, [3], {})
    assert own.tensor.tolist() == [4] * 100
    own.close()


def test_a_mapping_that_nobody_closes_ends_with_its_owner(cuda):
    own = OwnMemory(100)
    cuda.maps_own = True
    mapped = MappedMemory(own.handle(), 100)
    assert len(cuda.opened) == 1
    del mapped
    assert cuda.opened == {}
    own.close()


def test_why_cuda_maps_nothing_is_said(cuda):
    own = OwnMemory(100)
    with pytest.raises(CudaMemoryError, match="invalid device context"):
        MappedMemory(own.handle(), 100)
    cuda.refusals["cudaIpcOpenMemHandle"] = [MAP_FAILED]
    with pytest.raises(CudaMemoryError, match=r"^cudaErrorMapBufferObjectFailed, mapping of buffer object failed$"):
        MappedMemory(own.handle(), 100)
    assert cuda.last_error == 0
    own.close()


def test_memory_is_given_back_when_the_device_is_still(cuda, monkeypatch):
    monkeypatch.setattr(device, "synchronize", lambda: cuda.calls.append("synchronize"))
    own = OwnMemory(100)
    own.close()
    assert cuda.calls[-3:] == ["synchronize", "cudaSetDevice", "cudaFree"]


def test_a_gpu_that_has_failed_does_not_keep_an_owner_from_closing(cuda, monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(device, "synchronize", fail)
    OwnMemory(100).close()
    assert cuda.allocated == {}


def test_without_the_bindings_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda_memory, "has_runtime", lambda: True)
    monkeypatch.setattr(device, "cuda_version", lambda: "13.0")
    monkeypatch.setattr(cuda_memory, "import_module", lambda name: (_ for _ in ()).throw(ImportError(f"no {name}")))
    with pytest.raises(CudaMemoryError, match=r'^no cuda\.bindings\.runtime: pip install "cuda-bindings==13\.\*", as'):
        OwnMemory(100)
