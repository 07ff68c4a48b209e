"""The `megatron` group of a configuration as the Megatron ranks take it."""

from typing import Any, Protocol

import torch

from converters.layouts.parallel_sizes import ParallelSizes
from megarl.schema import MegarlConfig
from megatron_ext.arguments import PARALLEL_FIELDS, split_options
from megatron_ext.options import MegatronOptions
from megatron_ext.supported_options import check_supported

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Values of `model.dtype`."""


class ModelGroup(Protocol):
    """A model beside the policy: what the groups `critic`, `reward_model` and those of `teachers` have in common."""

    megatron: dict[str, Any]
    ranks: int | None


def megatron_options(config: MegarlConfig, model: ModelGroup | None = None) -> MegatronOptions:
    """Megatron's options in a checked configuration, for the policy or for another model beside it.

    Options that such a model does not set are the policy's. Raises UserError for an option that is not supported, and
    for sizes that do not fit each other.
    """
    options = {**config.megatron, **(model.megatron if model else {})}
    check_supported(options)
    ranks = (model.ranks if model else None) or config.cluster.trainer_ranks
    groups = split_options(options)
    return MegatronOptions(
        parallel=ParallelSizes(
            world_size=ranks, **{name: value for name, value in options.items() if name in PARALLEL_FIELDS}
        ),
        params_dtype=DTYPES[config.model.dtype],
        transformer=groups["transformer"],
        optimizer=groups["optimizer"],
        distributed=groups["distributed"],
        scheduler=groups["scheduler"],
        fp32_logits=config.model.fp32_logits,
        shared_prefixes=config.loop.shared_prefixes,
    )
