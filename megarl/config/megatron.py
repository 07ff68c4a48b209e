"""The `megatron` group of a configuration as the Megatron ranks take it."""

import torch

from converters.layouts.parallel_sizes import ParallelSizes
from megarl.config.schema import MegarlConfig
from megatron_ext.arguments import PARALLEL_FIELDS, split_options
from megatron_ext.options import MegatronOptions

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Values of `model.dtype`."""


def parallel_sizes(config: MegarlConfig) -> ParallelSizes:
    """How the policy is cut. Raises UserError for sizes that do not fit each other."""
    sizes = {name: value for name, value in config.megatron.items() if name in PARALLEL_FIELDS}
    return ParallelSizes(world_size=config.cluster.trainer_ranks, **sizes)


def megatron_options(config: MegarlConfig) -> MegatronOptions:
    """What a checked configuration asks of Megatron. Raises UserError for sizes that do not fit each other."""
    groups = split_options(config.megatron)
    return MegatronOptions(
        parallel=parallel_sizes(config),
        params_dtype=DTYPES[config.model.dtype],
        transformer=groups["transformer"],
        optimizer=groups["optimizer"],
        distributed=groups["distributed"],
        scheduler=groups["scheduler"],
    )
