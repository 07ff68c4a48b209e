"""Megatron's options of a run, cut along the classes that will read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from converters.layouts.megatron import ParallelSizes

_BLOCKS = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": 32, "custom": 32}
"""Rows that matrix products of 8 or 4 bits take at a time, by recipe: Transformer Engine refuses other numbers."""
_DEFAULT_RECIPES = {"fp8": "delayed", "fp4": "nvfp4"}


@dataclass(frozen=True)
class MegatronOptions:
    """The `megatron` group of the configuration: each mapping holds fields of one class, by Megatron's names."""

    parallel: ParallelSizes
    params_dtype: torch.dtype
    transformer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    distributed: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    fp32_logits: bool = False
    """See `linear_log_probs`."""

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches is a multiple of this: interleaved pipeline stages run them group by group."""
        if self.parallel.chunks == 1:
            return 1
        size = self.parallel.pipeline_model_parallel_size
        return self.transformer.get("microbatch_group_size_per_vp_stage") or size

    @property
    def token_multiple(self) -> int:
        """The number of tokens of a micro-batch is a multiple of this, so that every rank has whole blocks of them."""
        recipes = (
            self.transformer.get(f"{kind}_recipe") or default
            for kind, default in _DEFAULT_RECIPES.items()
            if self.transformer.get(kind)
        )
        return max((_BLOCKS[recipe] for recipe in recipes), default=1) * self.parallel.tensor_model_parallel_size
