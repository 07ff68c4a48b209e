"""A rank on a GPU writes for an engine's loader the bytes that a rank on the host writes."""

import pytest
import torch
from gpus import needs_gpus
from small_configs import make_config

from converters.architectures import read_architecture
from converters.layouts.megatron import ParallelSizes, megatron_layout
from converters.number_formats import FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8, NumberFormat
from megarl.resharding.loader.buckets import Quantised, cut_into_buckets
from megarl.resharding.loader.source import WeightSource
from megarl.resharding.shared_memory import Segment

SIZES = ParallelSizes()
CONFIG = make_config("qwen3_moe", hidden_size=256, moe_intermediate_size=128, head_dim=64, num_hidden_layers=2)


@pytest.mark.cuda
@needs_gpus(1)
@pytest.mark.parametrize("number_format", [FP8_BLOCK, FP8_BLOCK_UE8M0, INT8_CHANNEL, MXFP8], ids=lambda each: each.name)
def test_a_gpu_writes_the_codes_and_scales_of_the_host(number_format: NumberFormat) -> None:
    on_gpu, on_host = (written(number_format, device) for device in ("cuda", "cpu"))
    assert on_host.any()
    assert torch.equal(on_gpu, on_host)


def written(number_format: NumberFormat, device: str) -> torch.Tensor:
    """The bytes of the one bucket of a model whose weights lie on `device`."""
    architecture = read_architecture(CONFIG)
    generator = torch.Generator().manual_seed(1)
    shapes = megatron_layout(architecture, SIZES, module_names="local").shard(0).local_shapes
    tensors = {
        name: (0.02 * torch.randn(shape, generator=generator)).bfloat16().to(device) for name, shape in shapes.items()
    }
    source = WeightSource(architecture, SIZES, 0, tensors, "local")
    quantised = Quantised(number_format, number_format.quantised_names(architecture))
    (bucket,) = cut_into_buckets(architecture.hf_shapes, source.dtypes(), 2**30, quantised=quantised)
    segment = Segment(bucket.size_bytes)
    source.map_segments([segment.handle()], bucket.size_bytes)
    segment.close()
    source.write(bucket)
    return segment.memory.clone()
