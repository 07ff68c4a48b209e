"""Trainer and engine give a GPU's memory back, one for the other, and have it again as it was."""

import pytest
import torch
from gpus import needs_gpus, needs_package
from test_engine_on_gpu import ARGUMENTS, greedy, running_engine

from megarl.quickstart.tiny_models import write_tiny_model
from megatron_ext import device
from megatron_ext.memory.storages import HostCopy, storages_of

pytestmark = [pytest.mark.cuda, needs_gpus(1)]
SLACK_BYTES = 2**26


def test_storages_leave_the_gpu_and_come_back() -> None:
    tensors = [torch.randn(2**26, device="cuda"), torch.randn(1000, 77, device="cuda")]
    views = [tensors[0][12345:], tensors[1].T]
    expected = [view.sum().item() for view in views]
    full = device.used_memory_bytes()
    copy = HostCopy(storages_of([*tensors, *views]), bucket_bytes=2**24)
    assert full - device.used_memory_bytes() > 2**28 - SLACK_BYTES
    others = torch.full((2**26,), float("nan"), device="cuda")
    copy.reload()
    assert [view.sum().item() for view in views] == expected
    del others


@needs_package("vllm")
def test_an_engine_gives_its_memory_back_and_answers_as_before(tmp_path) -> None:
    folder = write_tiny_model("qwen3", tmp_path)
    with running_engine(folder, enable_sleep_mode=True) as engine:
        before, awake = greedy(engine), device.used_memory_bytes()
        engine.sleep()
        asleep = device.used_memory_bytes()
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            greedy(engine)
        engine.wake_up(["weights"])
        half = device.used_memory_bytes()
        engine.wake_up(["weights", "kv_cache"])
        assert greedy(engine) == before
    cache_bytes = ARGUMENTS["gpu_memory_utilization"] * torch.cuda.get_device_properties(0).total_memory / 2
    assert awake - asleep > cache_bytes
    assert awake - half > cache_bytes
