"""FLOPs of a model: matmuls and attention."""

from math import inf, prod
from typing import NamedTuple

from converters.architectures import Architecture, Lora, adapter_architecture

_EXPERTS = ".experts."


class PassFlops(NamedTuple):
    """Floating-point operations of passes over tokens: a sequence of L tokens takes per_token L + per_square L^2.

    Example: PassFlops(per_token=2.7e8, per_square=34_560), a forward pass of SmolLM2 135M
    """

    per_token: float
    """Per pass, 2 P for the P weights that a token uses."""
    per_square: float
    """Per pass, heads (d_qk + d_v) layers for causal attention, in which half of the pairs are masked."""

    @property
    def attention_length(self) -> float:
        """The length at which a sequence's attention costs as much as its matmuls."""
        return self.per_token / self.per_square if self.per_square else inf

    def of(self, tokens: float, squares: float) -> float:
        """FLOPs of sequences with `tokens` tokens in total, whose squared lengths add up to `squares`."""
        return self.per_token * tokens + self.per_square * squares


def forward_flops(architecture: Architecture, adapter: Lora | None = None) -> PassFlops:
    """FLOPs of a model's forward pass, with active experts only, and ignoring attention windows.

    Multi-token prediction layers do not run in it.
    """
    model = architecture.without_mtp
    adapters = _adapter_weights(architecture, adapter)
    return PassFlops(2 * (_active_weights(model) + adapters), _attention(architecture, architecture.num_layers))


def update_flops(
    architecture: Architecture,
    adapter: Lora | None = None,
    *,
    prediction_layers: bool = False,
    detached: bool = False,
) -> PassFlops:
    """FLOPs of a forward and a backward pass.

    Backward, each matmul becomes two: the gradients of its input and of its weight. A frozen weight has no gradient:
    with an `adapter`, all weights of the model are frozen. `prediction_layers` run only here; if they are `detached`,
    the output layer behind them is frozen.
    """
    model = _active_weights(architecture.without_mtp)
    products = (2 if adapter else 3) * model + 3 * _adapter_weights(architecture, adapter)
    layers = architecture.num_layers
    if prediction_layers:
        output = architecture.gpt_model["vocab_size"] * architecture.transformer_config["hidden_size"]
        products += 3 * (_active_weights(architecture) - model)
        products += (2 if detached else 3) * architecture.mtp_layers * output
        layers += architecture.mtp_layers
    return PassFlops(2 * products, 3 * _attention(architecture, layers))


def _adapter_weights(architecture: Architecture, adapter: Lora | None) -> float:
    return 0.0 if adapter is None else _active_weights(adapter_architecture(architecture, adapter))


def _attention(architecture: Architecture, layers: int) -> float:
    return architecture.transformer_config["num_attention_heads"] * sum(head_widths(architecture)) * layers


def _active_weights(architecture: Architecture) -> float:
    """The number of matmul weights that a token uses, with active experts only."""
    config = architecture.transformer_config
    # An embedding is only looked up, but may also be the output layer.
    is_tied = architecture.gpt_model["share_embeddings_and_output_weights"]
    share = config["moe_router_topk"] / config["num_moe_experts"] if config.get("num_moe_experts") else 1.0
    return sum(
        prod(shape) * (share if _EXPERTS in name else 1.0)
        for name, shape in architecture.hf_shapes.items()
        if len(shape) > 1 and (is_tied or "embed_tokens" not in name)
    )


def head_widths(architecture: Architecture) -> tuple[int, int]:
    """The widths of a head's keys and values."""
    config = architecture.transformer_config
    if architecture.multi_latent_attention:
        return config["qk_head_dim"] + config["qk_pos_emb_head_dim"], config["v_head_dim"]
    return config["kv_channels"], config["kv_channels"]


def decoding_widths(architecture: Architecture) -> tuple[int, int]:
    """The widths of a head's keys and values in decoding: with latent attention, those of the latent itself."""
    config = architecture.transformer_config
    if architecture.multi_latent_attention:
        return config["kv_lora_rank"] + config["qk_pos_emb_head_dim"], config["kv_lora_rank"]
    return head_widths(architecture)
