"""Rows that are multiplied by a matrix on a CPU, with the same bits whatever other rows there are (torch 2.13)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 16
"""From so many rows on, a row's product has the same bits, with MKL and with oneDNN and for all widths but 1.

Measured: with MKL on a CPU with AVX-512 the last number of rows at which bits differ is 2 for a row of 64 and 15 for
one of 512 or more. Another CPU may need more; test_cpu_linear.py says so there.
"""
_WITHOUT_ONEDNN = 16**3
"""Multiplications of the largest product that torch computes without oneDNN, in another order
(`checksize` in aten/src/ATen/native/mkldnn/Matmul.cpp)."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, which adds up in another order where rows are few: rows of zeros are added to these."""
    rows = x.numel() // x.shape[-1]
    needed = max(ROWS, _WITHOUT_ONEDNN // weight.numel() + 1)
    if rows >= needed:
        return F.linear(x, weight, bias)
    product = F.linear(with_enough_rows(x.reshape(rows, x.shape[-1]), needed), weight, bias)
    return product[:rows].view(*x.shape[:-1], weight.shape[0])


def with_enough_rows(x: Tensor, needed: int = ROWS) -> Tensor:
    """`x` [rows, width], and behind it as many rows of zeros as it lacks."""
    return F.pad(x, (0, 0, 0, max(0, needed - len(x))))


class LinearInAnyBatch(TorchFunctionMode):
    """Inside, every call of `F.linear` is one of `linear`."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        # The mode is off in here.
        return (linear if function is F.linear else function)(*arguments, **(named or {}))
