"""Batch-invariant linear layers on a CPU: a row's result does not depend on the other rows (torch 2.13)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 16
"""From this many rows on, a row's product has the same bits, with MKL and with oneDNN, for all widths but 1.

Measured with MKL on a CPU with AVX-512: bits last differ at 2 rows for a width of 64, and at 15 rows for widths of 512
or more. Another CPU may need more; test_cpu_linear.py fails there.
"""
_WITHOUT_ONEDNN = 16**3
"""Up to this many multiplications torch does not use oneDNN, and sums in another order (`checksize` in
aten/src/ATen/native/mkldnn/Matmul.cpp).
"""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with zero rows added if there are few rows, for which it would sum in another order."""
    rows = x.numel() // x.shape[-1]
    needed = max(ROWS, _WITHOUT_ONEDNN // weight.numel() + 1)
    if rows >= needed:
        return F.linear(x, weight, bias)
    product = F.linear(with_enough_rows(x.reshape(rows, x.shape[-1]), needed), weight, bias)
    return product[:rows].view(*x.shape[:-1], weight.shape[0])


def with_enough_rows(x: Tensor, needed: int = ROWS) -> Tensor:
    """Pad `x` [rows, width] with zero rows to `needed` rows."""
    return F.pad(x, (0, 0, 0, max(0, needed - len(x))))


class LinearInAnyBatch(TorchFunctionMode):
    """While active, every call of `F.linear` is replaced by `linear`."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        # The mode is off in here, so this does not recurse.
        return (linear if function is F.linear else function)(*arguments, **(named or {}))
