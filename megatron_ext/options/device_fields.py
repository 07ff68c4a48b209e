"""Fields of megatron-core's TransformerConfig that depend on the device and the installed packages."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from converters.errors import UserError
from megatron_ext import device
from megatron_ext.options.refusal import refuse
from megatron_ext.options.supported_options import DEEPEP, WITHOUT_DEEPEP

TRANSFORMER_ENGINE = "transformer_engine"
"""Value of `transformer_impl` for Transformer Engine's modules; `LOCAL` is for megatron-core's own."""
LOCAL = "local"
_APEX = "fused_weight_gradient_mlp_cuda"
_EXTENSION = "megatron.core.extensions.transformer_engine"
_KERNELS_OF_TRANSFORMER_ENGINE = (
    "apply_rope_fusion",
    "cross_entropy_loss_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "moe_grouped_gemm",
    "moe_permute_fusion",
)


def chosen_implementation(fields: Mapping[str, Any], params_dtype: torch.dtype) -> str:
    """The `transformer_impl` of `fields`; by default Transformer Engine's if it can be used and weights are not fp32.

    Raises UserError if Transformer Engine is chosen but not available, or would multiply fp32 weights in TF32.
    """
    is_there = device.has_transformer_engine()
    usual = TRANSFORMER_ENGINE if is_there and params_dtype != torch.float32 else LOCAL
    chosen = str(fields.get("transformer_impl") or usual)
    if chosen == TRANSFORMER_ENGINE and not is_there:
        raise UserError(
            f"megatron.transformer_impl={chosen} needs Transformer Engine on a GPU, which is not here: use {LOCAL}"
        )
    if chosen == TRANSFORMER_ENGINE and params_dtype == torch.float32:
        # Its matmuls (`cublaslt_gemm.cu`, 2.11) use TF32 regardless of torch's settings.
        raise UserError(
            f"megatron.transformer_impl={chosen} multiplies fp32 with the 10 bits of TF32's mantissa: leave it out, or"
            " set model.dtype=bf16"
        )
    return chosen


def check_packages(fields: Mapping[str, Any]) -> None:
    """Raise UserError for the first field that needs a package which this Python cannot import."""
    if not _is_there(DEEPEP):
        refuse(fields, WITHOUT_DEEPEP, "megatron.", f" where {sys.executable} cannot import {DEEPEP}")


def required_fields(fields: Mapping[str, Any], implementation: str) -> dict[str, Any]:
    """Fields of which only one value works on this device with this `implementation` and the other `fields`."""
    if implementation == TRANSFORMER_ENGINE:
        # If a rank gets no token, its kernel (2.11) returns none, while the others expect as many as they sent.
        gathers = fields.get("moe_token_dispatcher_type") == "allgather"
        return {"moe_grouped_gemm": True, **({"moe_permute_fusion": False} if gathers else {})}
    without_kernels: dict[str, Any] = dict.fromkeys(_KERNELS_OF_TRANSFORMER_ENGINE, False)
    if not _is_there(_APEX):
        without_kernels["gradient_accumulation_fusion"] = False
    if device.backend() == "nccl":
        return without_kernels
    return {
        **without_kernels,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        # gloo may still be sending the tensor that this option frees.
        "deallocate_pipeline_outputs": False,
    }


def default_fields(fields: Mapping[str, Any], implementation: str) -> dict[str, Any]:
    """Fields that Megatron's own training script turns on, but its dataclasses do not, for a model with `fields`.

    Empty on a CPU; with CUDA, those whose kernels are installed and support the model and its `implementation`.
    """
    if device.backend() != "nccl":
        return {}
    return {row.field: True for row in _TRAINING_DEFAULTS if row.suits(fields) and row.is_there(implementation)}


@dataclass(frozen=True)
class _TrainingDefault:
    """A field that is True if one of `needs` (`module` or `module:name`) is available and the model `suits`."""

    field: str
    needs: tuple[str, ...] = ("torch",)
    suits: Callable[[Mapping[str, Any]], bool] = lambda _fields: True

    def is_there(self, implementation: str) -> bool:
        """Whether `implementation` can use one of `needs`: only Transformer Engine's can use that package's kernels."""
        is_own = implementation == TRANSFORMER_ENGINE
        return any(_is_there(each) for each in self.needs if is_own or not each.startswith(_EXTENSION))


def _rotates_whole_heads(fields: Mapping[str, Any]) -> bool:
    # The kernel for packed sequences does not support interleaved rotation, and megatron-core does not check that.
    return not fields.get("multi_latent_attention") and not fields.get("rotary_interleaved")


def _rotates_latent_heads(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("multi_latent_attention")) and fields.get("rope_type") == "yarn"


def _is_swiglu(fields: Mapping[str, Any]) -> bool:
    swiglu = fields.get("activation_func") is F.silu and fields.get("gated_linear_unit")
    return bool(swiglu) and not fields.get("use_te_activation_func")


_TRAINING_DEFAULTS = (
    _TrainingDefault(
        "gradient_accumulation_fusion",
        (f"{_EXTENSION}:HAVE_TE", _APEX),
    ),
    _TrainingDefault(
        "apply_rope_fusion",
        ("megatron.core.models.common.embeddings.rope_utils:fused_apply_rotary_pos_emb_thd",),
        _rotates_whole_heads,
    ),
    _TrainingDefault(
        "apply_rope_fusion",
        ("megatron.core.fusions.fused_mla_yarn_rope_apply:HAVE_TRITON",),
        _rotates_latent_heads,
    ),
    _TrainingDefault(
        "moe_permute_fusion",
        (f"{_EXTENSION}:fused_permute_with_probs",),
        lambda fields: bool(fields.get("num_moe_experts")),
    ),
    _TrainingDefault("bias_activation_fusion", suits=_is_swiglu),
    _TrainingDefault("bias_dropout_fusion", suits=lambda fields: not fields.get("add_bias_linear", True)),
    _TrainingDefault("deallocate_pipeline_outputs"),
)
"""As of megatron-core 0.16.1. Megatron also turns on `masked_softmax_fusion`, for an attention not used here."""


def _is_there(name: str) -> bool:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return not attribute or bool(getattr(found, attribute, None))
