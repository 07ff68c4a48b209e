"""The rotation of queries of latent attention in place, on a GPU: the same numbers each time, those of the formula."""

import pytest
import torch
from gpus import needs_gpus

from megatron_ext import compat

pytestmark = [pytest.mark.cuda, needs_gpus(1)]
HEADS, PLAIN, ROTATED = 128, 128, 64
LENGTHS = (700, 1, 323)


def rotated(queries, cos, sin):
    """By the formula, with pairs in the place of halves before."""
    first, second = queries[..., PLAIN::2].float(), queries[..., PLAIN + 1 :: 2].float()
    (cos_left, cos_right), (sin_left, sin_right) = cos.chunk(2, -1), sin.chunk(2, -1)
    halves = [first * cos_left - second * sin_left, second * cos_right + first * sin_right]
    return torch.cat([queries[..., :PLAIN], *(half.to(queries.dtype) for half in halves)], -1)


def test_it_is_right_each_time():
    from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_q

    compat.install()
    generator = torch.Generator().manual_seed(0)
    given, upstream = torch.randn(2, sum(LENGTHS), HEADS, PLAIN + ROTATED, generator=generator).cuda().bfloat16()
    angles = torch.randn(max(LENGTHS), 1, 1, ROTATED, generator=generator).cuda()
    cos, sin = angles.cos(), angles.sin()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).cuda()

    exact = given.clone().requires_grad_()
    expected = rotated(exact, cos[positions, 0], sin[positions, 0])
    expected.backward(upstream)
    for _ in range(200):
        leaf = given.clone().requires_grad_()
        # The kernels write over what they are given.
        found = fused_apply_mla_rope_for_q(leaf * 1, cos, sin, PLAIN, ROTATED, ends)
        found.backward(upstream.clone())
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(leaf.grad, exact.grad, atol=2e-2, rtol=2e-2)
