"""The CPU's kernel for sequences of several lengths: by whole scores and in tiles it gives what plain torch gives."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_ext.attention import varlen_kernels
from megatron_ext.attention.varlen_kernels import CpuKernel, Merged, VarlenSequences

SCALE = 0.3
CAUSAL = VarlenSequences((3, 70, 5, 1, 64, 4), (3, 70, 5, 1, 64, 4), True, SCALE)
TO_PREFIXES = VarlenSequences((3, 70, 1), (40, 2, 65), False, SCALE)


@pytest.mark.parametrize("is_small", [True, False], ids=["whole scores", "tiles"])
@pytest.mark.parametrize("sequences", [CAUSAL, TO_PREFIXES], ids=["causal", "prefixes"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (2, 2), (3, 1)])
def test_outputs_log_sum_exps_and_gradients(
    is_small: bool, sequences: VarlenSequences, heads: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen_kernels, "_is_small", lambda *_: is_small)
    generator = torch.Generator().manual_seed(0)
    count, others = sum(sequences.queries), sum(sequences.keys)
    shapes = (count, heads, 8), (others, groups, 8), (others, groups, 8)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    gradient = torch.randn(shapes[0], generator=generator)
    output, total = plainly(*(each.double() for each in inputs), sequences)
    expected = torch.autograd.grad(output, inputs, gradient.double())

    given = [each.detach() for each in inputs]
    found = CpuKernel().forward(*given, sequences)
    for one, other in zip(found, (output, total), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    for one, other in zip(CpuKernel().backward(*given, Merged(gradient, *found), sequences), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def plainly(query: Tensor, key: Tensor, value: Tensor, sequences: VarlenSequences) -> tuple[Tensor, Tensor]:
    """Sequence by sequence and with all keys repeated."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    outputs, totals = [], []
    queries, keys = (list(itertools.pairwise(itertools.accumulate(each, initial=0))) for each in sequences[:2])
    for (start, stop), (first, last) in zip(queries, keys, strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], key[first:last]) * SCALE
        if sequences.is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[first:last]))
        totals.append(scores.logsumexp(-1).t())
    return torch.cat(outputs), torch.cat(totals)
