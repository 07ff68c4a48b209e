"""Chooses the core attention of a model with Transformer Engine: the first that handles its packed sequences correctly.

Transformer Engine's support depends on its version, cuDNN's and the GPU: packed sequences (THD) whose values are
narrower than their keys, as in multi-latent attention, fail on some. So a small forward and backward pass is tried
before the model is built.

As a last resort Transformer Engine multiplies whole score matrices, and pads all sequences of a micro-batch to the
longest: one of 8,192 tokens with thirty short ones takes 67 GB. An attention that would need this is not chosen.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from converters.errors import UserError
from megatron_ext import device
from megatron_ext.attention.packed_attention import PackedAttention

logger = logging.getLogger(__name__)

_UNFUSED = "NVTE_UNFUSED_ATTN"
"""Variable that allows Transformer Engine's whole score matrices; megatron-core sets it."""
_LENGTHS = (40, 24)
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
"""Largest error of outputs and gradients, whose size is about 1."""


def needs_preflight(config: TransformerConfig) -> bool:
    """Whether Transformer Engine may lack a kernel: for values narrower than keys, for float32, or on this GPU."""
    return bool(config.multi_latent_attention) or config.params_dtype == torch.float32 or _may_lack_kernel(config)


def _may_lack_kernel(config: TransformerConfig) -> bool:
    """Whether cuDNN's attention cannot train with packed sequences here, according to Transformer Engine 2.11."""
    capability = device.compute_capability()
    if capability is None:
        return False
    is_hopper = capability[0] == 9
    return (
        capability < (9, 0)
        or capability == (12, 0)
        or (config.deterministic_mode and not is_hopper)
        or config.kv_channels > (256 if is_hopper else 128)
    )


def core_attention(fused: type[nn.Module], config: TransformerConfig) -> type[nn.Module]:
    """Return `fused`, `fused` with values padded to the width of the keys, or plain torch: the first that works here.

    Transformer Engine may use the kernels that the configuration chooses, here and afterwards; here none that keeps
    whole score matrices, unless the configuration asks for these.

    Raises UserError if none of the three works.
    """
    # megatron-core sets the environment only when it builds the model, too late for this trial pass.
    LanguageModule._set_attention_backend(SimpleNamespace(config=config))
    with _without_kept_scores(config):
        return _first_that_works((fused, with_padded_values(fused), PackedAttention), config)


@contextmanager
def _without_kept_scores(config: TransformerConfig) -> Iterator[None]:
    """Within the context, Transformer Engine fails in place of using whole score matrices."""
    chosen = os.environ[_UNFUSED]
    if config.attention_backend != AttnBackend.unfused:
        os.environ[_UNFUSED] = "0"
    try:
        yield
    finally:
        os.environ[_UNFUSED] = chosen


def _first_that_works(candidates: Sequence[type[nn.Module]], config: TransformerConfig) -> type[nn.Module]:
    reasons: list[str] = []
    for candidate in candidates:
        reason = why_not(candidate, config)
        if reason is None:
            if reasons:
                logger.warning("attention is computed by %s, because %s", candidate.__name__, "; ".join(reasons))
            return candidate
        reasons.append(f"{candidate.__name__} cannot: {reason}")
    raise UserError(f"no attention computes the packed sequences of this model on {device.device()}: {reasons}")


def with_padded_values(core: type[nn.Module]) -> type[nn.Module]:
    """A core attention like `core` that pads values to the width of the keys, and cuts the outputs back."""
    return type(f"PaddedValues{core.__name__}", (_PaddedValues, core), {})


class _PaddedValues(nn.Module):
    def __init__(
        self,
        *arguments: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,  # noqa: ARG002
        **options: Any,
    ) -> None:
        super().__init__(*arguments, k_channels=k_channels, v_channels=k_channels, **options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Attend; shapes as of the attention that this pads for."""
        width, padded = value.shape[-1], key.shape[-1]
        output = super().forward(query, key, F.pad(value, (0, padded - width)), *arguments, **options)
        return output.unflatten(-1, (-1, padded))[..., :width].flatten(-2)


def why_not(core: type[nn.Module], config: TransformerConfig) -> str | None:
    """Why `core` does not work for a model with `config`; None if a forward and backward pass is correct."""
    # Test whole sequences, without context parallelism.
    config = copy(config)
    config.context_parallel_size = 1
    inputs = _inputs(config)
    try:
        found = _pass(core, config, inputs)
    except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    expected = _pass(PackedAttention, config, inputs)
    distances = [((a - b).abs() / (1 + b.abs())).max() for a, b in zip(found, expected, strict=True)]
    # A NaN fails, too: torch's max keeps it, and Python's would lose one behind a number.
    difference = float(torch.stack(distances).max())
    if not difference <= _TOLERANCE[config.params_dtype]:
        return f"its result is {difference:.3g} away from that of plain torch"
    return None


def _widths(config: TransformerConfig) -> tuple[int, int]:
    if config.multi_latent_attention:
        return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    return config.kv_channels, config.kv_channels


def _inputs(config: TransformerConfig) -> list[Tensor]:
    """Query, key and value of two sequences, and a gradient of the output."""
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    groups = heads
    if not config.multi_latent_attention:
        groups = max(1, config.num_query_groups // config.tensor_model_parallel_size)
    keys, values = _widths(config)
    shapes = [(heads, keys), (groups, keys), (groups, values), (heads * values,)]
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(sum(_LENGTHS), *shape, generator=generator) for shape in shapes)
    return [tensor.to(device.device(), config.params_dtype) for tensor in tensors]


def _pass(core: type[nn.Module], config: TransformerConfig, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients of query, key and value."""
    keys, values = _widths(config)
    attention: nn.Module = core(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        attention_dropout=0.0,
        softmax_scale=keys**-0.5,
        k_channels=keys,
        v_channels=values,
    )
    bounds = torch.tensor([0, _LENGTHS[0], sum(_LENGTHS)], dtype=torch.int32, device=inputs[0].device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(_LENGTHS),
        max_seqlen_kv=max(_LENGTHS),
    )
    *leaves, gradient = (tensor.detach().requires_grad_() for tensor in inputs)
    with torch.enable_grad():
        # In training mode, because Transformer Engine chooses other kernels without a backward pass.
        output = attention(
            *leaves, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed, attention_bias=None
        )
        output.backward(gradient.detach())
    return [output.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]
