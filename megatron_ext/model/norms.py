"""Norms in plain torch: for local modules, on a CPU and on GPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm (arXiv 1910.07467) that supports sequence parallelism.

    Replaces megatron-core's WrappedTorchNorm, which refuses sequence parallelism. It only takes a mark on the weight,
    with which Megatron sums the gradient over the tensor-parallel ranks, each of which saw different tokens.

    With `layernorm_zero_centered_gamma` the stored weight is the effective weight minus 1, and 1 is added in float32.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        if config.normalization != "RMSNorm":
            raise NotImplementedError(f"{config.normalization} without Transformer Engine")
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`."""
        if not self.zero_centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)
