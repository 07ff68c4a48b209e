"""What a run asks of Megatron, cut along the classes that will read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from converters.layouts.megatron import ParallelSizes


@dataclass(frozen=True)
class MegatronOptions:
    """The `megatron` group of the configuration: each mapping holds fields of one class, by Megatron's names."""

    parallel: ParallelSizes
    params_dtype: torch.dtype
    transformer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    distributed: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
