"""Normalisation in plain torch, for CPU and for GPUs without Transformer Engine."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm (arXiv 1910.07467) that works under sequence parallelism.

    Takes the place of megatron-core's WrappedTorchNorm, which refuses sequence parallelism. Tagging the weight is all
    that it lacks: Megatron then sums the gradient over the tensor-parallel ranks, each of which saw other tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise NotImplementedError(f"{config.normalization} or a zero-centred weight without Transformer Engine")
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
