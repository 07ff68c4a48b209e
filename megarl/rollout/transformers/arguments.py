"""Arguments of the transformers engine: those of `from_pretrained` by their own names, and the engine's few."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.rollout.transformers.kind import MAX_NUM_SEQS, TRANSFORMERS


@dataclass(frozen=True)
class TransformersArguments:
    """`rollout.engine_args` where `rollout.engine` is transformers."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and computation; auto takes that of config.json."""
    attn_implementation: str | None = None
    """Attention implementation by transformers' name, such as eager or sdpa. The default is transformers' choice for
    the model, or eager if the model soft-caps attention scores.
    """
    experts_implementation: str | None = None
    """Experts implementation by transformers' name, such as eager or grouped_mm. The default is transformers' choice
    for the model.
    """
    max_model_len: int | None = None
    """Most tokens of a prompt and its response together; by default the limit of config.json."""
    max_num_seqs: int = MAX_NUM_SEQS
    """Samples of a request that are computed together. With 1, a sample does not depend on others even in its last bit.
    """
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy reads no weights; the first update brings them."""
    enable_return_routed_experts: bool = False
    """Whether answers include the experts of each token."""
    float32_logits: bool = False
    """Whether the output layer computes in float32, regardless of `dtype`."""


def read_arguments(given: Mapping[str, Any]) -> TransformersArguments:
    """Parse the arguments. Raises UserError for an unknown name or an invalid value."""
    TRANSFORMERS.check(given)
    types = TRANSFORMERS.arguments()
    return TransformersArguments(**{name: types[name].convert(value) for name, value in given.items()})
