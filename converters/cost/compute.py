"""Cost of computing with a model: matrix products and attention."""

from math import inf, prod
from typing import NamedTuple

from converters.architectures import Architecture

_EXPERTS = ".experts."


class ForwardFlops(NamedTuple):
    """Floating-point operations of a forward pass: a sequence of L tokens takes per_token L + per_square L^2.

    Example: ForwardFlops(per_token=2.7e8, per_square=34_560), which is SmolLM2 135M
    """

    per_token: float
    """2 P for the P weights that a token meets."""
    per_square: float
    """heads (d_qk + d_v) layers for causal attention, where half of the pairs are hidden."""

    @property
    def attention_length(self) -> float:
        """The length at which the attention of a sequence costs as much as its other matrix products."""
        return self.per_token / self.per_square if self.per_square else inf


def forward_flops(architecture: Architecture) -> ForwardFlops:
    """Matrix products of a model's forward pass; of experts those that a token goes to, windows not considered."""
    config = architecture.transformer_config
    per_square = config["num_attention_heads"] * sum(head_widths(architecture)) * architecture.num_layers
    return ForwardFlops(2 * _active_weights(architecture), per_square)


def _active_weights(architecture: Architecture) -> float:
    """The weights of matrix products that a token meets: of experts those that it is sent to."""
    config = architecture.transformer_config
    # An embedding is looked up, but the same weights may be the output layer.
    is_tied = architecture.gpt_model["share_embeddings_and_output_weights"]
    share = config["moe_router_topk"] / config["num_moe_experts"] if config.get("num_moe_experts") else 1.0
    return sum(
        prod(shape) * (share if _EXPERTS in name else 1.0)
        for name, shape in architecture.hf_shapes.items()
        if len(shape) > 1 and (is_tied or "embed_tokens" not in name)
    )


def head_widths(architecture: Architecture) -> tuple[int, int]:
    """Widths of the keys and values of a head."""
    config = architecture.transformer_config
    if architecture.multi_latent_attention:
        return config["qk_head_dim"] + config["qk_pos_emb_head_dim"], config["v_head_dim"]
    return config["kv_channels"], config["kv_channels"]
