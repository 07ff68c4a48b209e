"""Converts the `megatron` group of a configuration to options of the Megatron ranks."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from converters.dtypes import SHORT_NAMES
from converters.errors import UserError
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.config.lora import adapter_options
from megarl.schema import MegarlConfig
from megarl.schema.algorithm import RewardModelConfig, TeacherConfig
from megatron_ext.options.arguments import PARALLEL_FIELDS, split_options
from megatron_ext.options.options import MegatronOptions, MtpTraining
from megatron_ext.options.supported_options import check_supported


class ModelGroup(Protocol):
    """The keys of a model other than the policy: critic, reward model, implicit reward model or teacher."""

    megatron: dict[str, Any]
    ranks: int | None


def megatron_options(config: MegarlConfig, model: ModelGroup | None = None) -> MegatronOptions:
    """The Megatron options in a checked configuration, for the policy or another model.

    Options that another model does not set are the policy's. Its multi-token-prediction layers are not trained: they
    are not used for drafts, and wrong responses would be learnt. Raises UserError for an unsupported option and for
    inconsistent sizes.
    """
    options = {**config.megatron, **(model.megatron if model else {})}
    check_supported(options)
    _check_sequence_parallel(options)
    ranks = (model.ranks if model else None) or config.cluster.trainer_ranks
    groups = split_options(options)
    found = MegatronOptions(
        parallel=ParallelSizes(
            world_size=ranks, **{name: value for name, value in options.items() if name in PARALLEL_FIELDS}
        ),
        params_dtype=SHORT_NAMES[config.model.dtype],
        transformer=groups["transformer"],
        optimizer=groups["optimizer"],
        distributed=groups["distributed"],
        scheduler=groups["scheduler"],
        fp32_logits=config.model.fp32_logits,
        shared_prefixes=config.loop.shared_prefixes,
        mtp_training="none" if model else cast(MtpTraining, config.model.mtp_training),
        freeze_moe_router=config.model.freeze_moe_router,
        adapter=None if model else adapter_options(config.lora, config.loop.seed),
    )
    if isinstance(model, RewardModelConfig | TeacherConfig) and found.scales_by_history:
        raise UserError(
            f"megatron.fp8={options['fp8']} with fp8_recipe=delayed, the default, scales by what earlier train steps"
            " met, and teachers and the reward model take none: set megatron.fp8_recipe=tensorwise, which scales by the"
            " present numbers, or in the megatron group of that model alone that or fp8=null"
        )
    return found


def _check_sequence_parallel(options: Mapping[str, Any]) -> None:
    tensor = options.get("tensor_model_parallel_size") or 1
    chosen = options.get("sequence_parallel")
    if chosen is not None and chosen != (tensor > 1):
        raise UserError(
            f"megatron.sequence_parallel={chosen} with megatron.tensor_model_parallel_size={tensor}: it is on exactly"
            " where that size is above 1, since experts and latent attention need it there; leave it out"
        )
