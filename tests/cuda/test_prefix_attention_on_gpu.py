"""Attention to shared prefixes by the fused kernel of a GPU: values and gradients of whole sequences in float64."""

import pytest
import torch
from gpus import needs_gpus

from megatron_ext.attention.attention import packed_causal_attention
from megatron_ext.attention.prefix_attention import SharedSequences, prefix_attention
from megatron_ext.attention.varlen_kernels import CudaKernel, kernel_for
from megatron_ext.packing.packing import RaggedBatch, pack
from megatron_ext.packing.shared_prefixes import share

pytestmark = [pytest.mark.cuda, needs_gpus(1)]


@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (192, 128)])
def test_attention_and_gradients_are_those_of_whole_sequences(width: int, value_width: int) -> None:
    prompt, turn = torch.arange(300), torch.arange(40)
    tails = [(7,), (130,), (1, 60), (1, 9)]
    tokens = [
        torch.cat([prompt, *([turn + 500] if len(tail) > 1 else []), torch.arange(tail[-1]) + 1000 * number + 1000])
        for number, tail in enumerate(tails)
    ]
    batch = RaggedBatch(torch.cat(tokens), torch.tensor([len(each) for each in tokens]))
    micro_batch = pack(batch, range(len(tokens)))
    part = share(micro_batch, 8)
    assert len(part.levels) == 2
    generator = torch.Generator().manual_seed(0)
    shapes = (8, width), (2, width), (2, value_width)
    inputs = [torch.randn(part.tokens.shape[1], *shape, generator=generator).bfloat16() for shape in shapes]
    upstream = torch.randn(len(batch.tokens), 8, value_width, generator=generator)
    exact = [each.double().requires_grad_() for each in inputs]
    rows = [each[part.places] for each in exact]
    expected = packed_causal_attention(*rows, micro_batch.cu_seqlens, softmax_scale=0.1)
    on_gpu = [each.to("cuda").requires_grad_() for each in inputs]
    assert isinstance(kernel_for(on_gpu[0]), CudaKernel)
    shared = SharedSequences(bounds=part.bounds, levels=part.levels)
    found = prefix_attention(*on_gpu, shared, softmax_scale=0.1)
    found = found[part.places.to("cuda")]
    gradients = torch.autograd.grad((found * upstream.to("cuda")).sum(), on_gpu)
    wanted = torch.autograd.grad((expected * upstream).sum(), exact)
    for got, right in zip((found, *gradients), (expected, *wanted), strict=True):
        assert float((got.cpu().double() - right).norm() / right.norm()) < 0.01
