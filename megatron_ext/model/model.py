"""Builds this rank's part of a model from an architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from converters.architectures import Architecture
from converters.errors import UserError
from converters.layouts.chunk_names import chunk_prefixes
from converters.layouts.megatron import ParallelSizes, megatron_layout
from megatron_ext import compat, device, versions
from megatron_ext.attention.rotary import rotate_by_position
from megatron_ext.model.backbone import Backbone, LanguageModel, ValueModel
from megatron_ext.model.extensions import scale_embedding
from megatron_ext.model.specs import block_spec, multi_token_prediction_spec
from megatron_ext.optimizer.fully_sharded import own_rows
from megatron_ext.options.device_fields import (
    TRANSFORMER_ENGINE,
    check_packages,
    chosen_implementation,
    default_fields,
    required_fields,
)
from megatron_ext.options.model_fields import without_model_fields
from megatron_ext.options.supported_options import check_supported
from megatron_ext.routing.router_loss_options import ROUTER_LOSS_OPTIONS

_PARALLEL_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)

_FEATURES_OF_TRANSFORMER_ENGINE = ("fp8", "fp4", "cpu_offloading")


def build_model(
    architecture: Architecture,
    parallel: ParallelSizes,
    *,
    params_dtype: torch.dtype,
    overrides: Mapping[str, Any] | None = None,
    fp32_logits: bool = False,
    shared_prefixes: bool = False,
    mtp_is_detached: bool = True,
) -> list[Backbone]:
    """Build the model chunks of this rank, one per virtual pipeline stage, with uninitialised parameters.

    The last chunk has the head `architecture.head`, and layers for multi-token prediction if the architecture has any;
    `mtp_is_detached` is for `LanguageModel`, and `fp32_logits` for `linear_log_probs`. `overrides` are fields of
    megatron-core's TransformerConfig. With `shared_prefixes` the model also accepts parts from `shared_prefixes.share`.
    Call this after `parallel.initialize`.

    Raises UserError if the sizes do not divide the model, and for an override that does not exist, that is determined
    by something else, or whose value megatron-core refuses.
    """
    compat.install()
    megatron_layout(architecture, parallel, module_names="local")  # checks the sizes
    config = transformer_config(
        architecture, parallel, params_dtype=params_dtype, overrides=overrides or {}, shared_prefixes=shared_prefixes
    )
    chunks = [
        _build_chunk(
            architecture,
            parallel,
            config,
            chunk,
            fp32_logits=fp32_logits,
            shared_prefixes=shared_prefixes,
            mtp_is_detached=mtp_is_detached,
        ).to(device.device())
        for chunk in range(parallel.chunks)
    ]
    versions.name_prediction_layers_as_in_files(chunks)
    compat.mark_expert_parameters(chunks)
    compat.mark_tensor_parallel_parameters(chunks)
    compat.unmark_duplicated_parameters(chunks)
    return chunks


def local_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Every parameter and persistent buffer of this rank, by its name in the Megatron layout.

    Names are those of `GPTModel.state_dict`, prefixed with `model{chunk}.` if there are several chunks. For parameters
    that FSDP2 has sharded, these are the rows of this rank.
    """
    return {
        prefix + name: own_rows(tensor)
        for prefix, chunk in zip(chunk_prefixes(len(chunks)), chunks, strict=True)
        for name, tensor in chunk.state_dict(keep_vars=True).items()
        # Transformer Engine's FP8 statistics are not weights.
        if isinstance(tensor, Tensor) and not name.endswith("_extra_state")
    }


def transformer_config(
    architecture: Architecture,
    parallel: ParallelSizes,
    *,
    params_dtype: torch.dtype,
    overrides: Mapping[str, Any],
    shared_prefixes: bool = False,
) -> TransformerConfig:
    """The configuration of all layers.

    In order of increasing precedence: the device's defaults, the architecture's fields, `overrides`, and fields that
    cannot be chosen.

    Raises UserError as `build_model` does.
    """
    check_supported(overrides)
    check_packages(overrides)
    # `router_balance` adds the router losses, since megatron-core's depend on how the batch is split.
    own = {name: value for name, value in overrides.items() if name not in ROUTER_LOSS_OPTIONS}
    overrides = without_model_fields(architecture, own)
    config_class = MLATransformerConfig if architecture.multi_latent_attention else TransformerConfig
    implementation = chosen_implementation(overrides, params_dtype)
    fixed = {
        **required_fields(overrides, implementation),
        **_fixed_fields(parallel, params_dtype),
        "transformer_impl": implementation,
        "mtp_num_layers": architecture.mtp_layers or None,
    }
    if shared_prefixes:
        # The fused kernels count positions from the start of each node.
        fixed["apply_rope_fusion"] = False
    _check_overrides(config_class, fixed, overrides, implementation)
    try:
        return compat.config_of_variable_lengths(
            config_class,
            {
                "moe_token_dispatcher_type": "alltoall",
                **default_fields({**architecture.transformer_config, **overrides, **fixed}, implementation),
                **architecture.transformer_config,
                **overrides,
                **fixed,
            },
        )
    except (ValueError, AssertionError) as error:
        chosen = ", ".join(f"{name}={value!r}" for name, value in overrides.items()) or "none"
        raise UserError(
            f"megatron-core refuses the configuration of this {architecture.model_type} model: {error}; change the"
            f" megatron fields (chosen: {chosen}) or the parallel sizes"
        ) from error


def _fixed_fields(parallel: ParallelSizes, params_dtype: torch.dtype) -> dict[str, Any]:
    """Fields determined by the parallel sizes, the dtype of the weights and the packed micro-batches."""
    interleaved = parallel.chunks > 1
    return {
        **{name: getattr(parallel, name) for name in _PARALLEL_FIELDS},
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
        # Required by MoE under tensor parallelism, and by latent attention for the gradient of the rotary key.
        "sequence_parallel": parallel.tensor_model_parallel_size > 1,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Packed micro-batches differ in length, so pipeline stages exchange shapes.
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        # This option accumulates in Megatron's gradient buffers, which FSDP2 does not have.
        **({"gradient_accumulation_fusion": False} if parallel.use_torch_fsdp2 else {}),
    }


def _check_overrides(
    config_class: type[TransformerConfig], fixed: Mapping[str, Any], overrides: Mapping[str, Any], implementation: str
) -> None:
    names = {field.name for field in fields(config_class)}
    for name, value in overrides.items():
        if name not in names:
            raise UserError(f"megatron.{name} is no field of megatron-core's {config_class.__name__}")
        if name in _FEATURES_OF_TRANSFORMER_ENGINE and value and implementation != TRANSFORMER_ENGINE:
            raise UserError(
                f"megatron.{name}={value} needs the modules of Transformer Engine, on a GPU: leave it out here"
            )
        if name in fixed and value != fixed[name]:
            raise UserError(
                f"megatron.{name} is {value!r}, but here it must be {fixed[name]!r}: it follows from the model, the"
                " device, the parallel sizes, the type of the weights and the packing of sequences; leave it out"
            )


def _build_chunk(
    architecture: Architecture,
    parallel: ParallelSizes,
    config: TransformerConfig,
    chunk: int,
    *,
    fp32_logits: bool,
    shared_prefixes: bool,
    mtp_is_detached: bool,
) -> Backbone:
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    stage = chunk if parallel.virtual_pipeline_model_parallel_size else None
    block = block_spec(
        config, architecture.extensions, pipeline_rank=pipeline_rank, chunk=stage, shared_prefixes=shared_prefixes
    )
    vocab_size = architecture.gpt_model["vocab_size"]
    arguments = {
        **architecture.gpt_model,
        "config": config,
        "transformer_layer_spec": block,
        "mtp_block_spec": multi_token_prediction_spec(config, block, chunk=stage),
        "pre_process": pipeline_rank == 0 and chunk == 0,
        "post_process": pipeline_rank == parallel.pipeline_model_parallel_size - 1 and chunk == parallel.chunks - 1,
        "vp_stage": stage,
        "vocab_size": parallel.padded_vocabulary(vocab_size),
    }
    model: Backbone
    if architecture.head == "value":
        model = ValueModel(**arguments)
    else:
        softcap = architecture.extensions.output_softcap
        model = LanguageModel(
            real_vocab_size=vocab_size,
            softcap=softcap,
            fp32_logits=fp32_logits,
            mtp_is_detached=mtp_is_detached,
            **arguments,
        )
    scale_embedding(model, architecture.extensions.embedding_scale)
    if shared_prefixes:
        rotate_by_position(model)
    return model
