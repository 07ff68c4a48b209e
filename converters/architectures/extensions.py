"""Computations of a model that megatron-core's GPTModel cannot be configured for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Extensions:
    """Additions to a GPTModel; the defaults add nothing."""

    embedding_scale: float | None = None
    """Factor of the token embeddings, rounded to the weights' dtype."""
    attention_softcap: float | None = None
    """`c`: attention scores become `c * tanh(scores / c)` before the mask and the softmax."""
    output_softcap: float | None = None
    """The same for the logits of the output layer."""
    post_norms: bool = False
    """A norm follows attention and another the MLP, each before its result is added to the residual."""
    experts_in_group_score: int | None = None
    """A router limited to groups of experts scores a group by the sum of this many of its best scores; a GPTModel takes
    the best `moe_router_topk // moe_router_group_topk`.
    """
