from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import UserError
from converters.number_formats import NVFP4
from megarl.resharding.loader import buckets as loader_buckets
from megarl.resharding.loader.buckets import Quantised, cut_into_buckets, loadable, views
from megatron_ext import device

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
tensors = st.lists(
    st.tuples(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.sampled_from(DTYPES)), min_size=1, max_size=12
)


@given(tensors, st.integers(864, 2000), st.integers(1, 3))
def test_every_tensor_comes_through_the_memory_of_its_bucket(made, bucket_bytes, segments):
    shapes = {f"t{i}": shape for i, (shape, _) in enumerate(made)}
    dtypes = {f"t{i}": dtype for i, (_, dtype) in enumerate(made)}
    buckets = cut_into_buckets(shapes, dtypes, bucket_bytes, segments)
    assert [entry.name for bucket in buckets for entry in bucket.entries] == list(shapes)
    assert [bucket.segment for bucket in buckets] == [i % segments for i in range(len(buckets))]
    for bucket in buckets:
        memory = torch.zeros(bucket_bytes, dtype=torch.uint8)
        # Everything is written before anything is read: an overlap would show.
        for value, tensor in enumerate(views(bucket, memory).values(), 1):
            tensor.copy_(torch.full(tensor.shape, float(value)))
        for value, (name, tensor) in enumerate(views(bucket, memory).items(), 1):
            assert tuple(tensor.shape) == shapes[name]
            assert tensor.dtype == dtypes[name]
            assert torch.equal(tensor.float(), torch.full(tensor.shape, float(value)))


def test_full_buckets_are_not_cut_further():
    shapes = dict.fromkeys("abcde", (32,))
    buckets = cut_into_buckets(shapes, dict.fromkeys(shapes, torch.float32), 256)
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [["a", "b"], ["c", "d"], ["e"]]


def test_a_tensor_larger_than_a_bucket_is_refused():
    with pytest.raises(UserError, match=r"big has 400 bytes.*raise refit.bucket_bytes to 400"):
        cut_into_buckets({"big": (100,)}, {"big": torch.float32}, 399)


def test_values_are_quantised_on_the_device_of_the_worker_and_come_back(monkeypatch):
    shapes = {"norm": (32,), "matrix": (2, 32)}
    quantised = Quantised(NVFP4, ["matrix"], as_values=["matrix"])
    (bucket,) = cut_into_buckets(shapes, dict.fromkeys(shapes, torch.bfloat16), 1000, quantised=quantised)
    memory = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
    views(bucket, memory)["matrix"].copy_(torch.arange(64).view(2, 32) / 8)
    expected = dict(NVFP4.tensors("matrix", torch.arange(64, dtype=torch.bfloat16).view(2, 32) / 8))
    seen = []

    def tensors(name, weight):
        seen.append((name, weight.device.type))
        # On what stands for a GPU nothing can be computed, nor copied from it.
        for made_name, made in expected.items():
            yield made_name, SimpleNamespace(to=lambda where, made=made: (where, made))

    monkeypatch.setattr(loader_buckets, "NUMBER_FORMATS", {NVFP4.name: SimpleNamespace(tensors=tensors)})
    monkeypatch.setattr(device, "device", lambda: torch.device("meta"))
    loaded = dict(loadable(bucket, memory))
    assert seen == [("matrix", "meta")]
    assert loaded.pop("norm").device.type == "cpu"
    assert loaded == {name: (torch.device("cpu"), made) for name, made in expected.items()}
    monkeypatch.undo()
    loaded = dict(loadable(bucket, memory))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
