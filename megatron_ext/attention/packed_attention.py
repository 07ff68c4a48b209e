"""Core attention of a GPTModel over packed sequences, in plain torch: for local modules, on a CPU and on GPUs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_ext.attention.attention import packed_causal_attention
from megatron_ext.attention.context_attention import context_parallel_attention
from megatron_ext.attention.prefix_attention import SharedSequences, prefix_attention


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed micro-batch (THD).

    Under context parallelism this rank has the tokens chosen by `context_parallel.cut`; with `shared_prefixes.share`
    shared prefixes are present once.

    Takes the place of megatron-core's DotProductAttention, which refuses packed sequences and keys and values of
    different width (multi-latent attention).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        softcap: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_options: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or attention_type != "self":
            raise NotImplementedError(f"{attention_type} attention with a {attn_mask_type.name} mask")
        self.layer_number = layer_number
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.softcap = softcap
        self.window = _window(config, layer_number)
        self.context_group = None
        if config.context_parallel_size > 1:
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
            self.context_group = groups.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002
        attn_mask_type: AttnMaskType | None = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend; `query` [T, heads, k_width], `key` [T, groups, k_width], `value` [T, groups, v_width].

        Returns [T, heads * v_width]. `attention_mask` and `attn_mask_type` are Megatron's and not read: the mask
        follows from `packed_seq_params`. Raises NotImplementedError for sequences that are not packed, and for a bias.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd" or attention_bias is not None:
            raise NotImplementedError("PackedAttention computes packed (thd) sequences without a bias")
        attend: Callable[..., Tensor] = packed_causal_attention
        sequences: Tensor | SharedSequences = packed_seq_params.cu_seqlens_q
        if isinstance(packed_seq_params, SharedSequences):
            attend, sequences = prefix_attention, packed_seq_params
        elif self.context_group is not None:
            attend = partial(context_parallel_attention, group=self.context_group)
        return attend(
            query,
            key,
            value,
            sequences,
            softmax_scale=self.softmax_scale,
            dropout=self.dropout if self.training else 0.0,
            softcap=self.softcap,
            window=self.window,
        ).flatten(1)


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """The size of the layer's attention window, the token itself included; None for full attention."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    before = config.window_size[0]
    return None if before < 0 else before + 1
