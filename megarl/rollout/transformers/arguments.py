"""Arguments of the transformers engine: those of `from_pretrained` by their own names, and the engine's few."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.rollout.transformers.kind import MAX_NUM_SEQS, TRANSFORMERS


@dataclass(frozen=True)
class TransformersArguments:
    """`rollout.engine_args` where `rollout.engine` is transformers."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights and of the arithmetic; auto is that of config.json."""
    attn_implementation: str | None = None
    """Attention as transformers calls it, such as eager or sdpa; by default what it takes for the model, or eager where
    the model caps the scores of attention."""
    experts_implementation: str | None = None
    """Experts as transformers calls them, such as eager or grouped_mm; by default what it takes for the model."""
    max_model_len: int | None = None
    """Tokens that a prompt and its response may have together; by default what config.json says."""
    max_num_seqs: int = MAX_NUM_SEQS
    """Samples of a request that are computed together. With 1, even the last bit of a sample depends on none else."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy reads no weights: the first update brings them."""
    enable_return_routed_experts: bool = False
    """Whether answers say which experts each token went to."""
    float32_logits: bool = False
    """Whether the output layer computes in float32 whatever `dtype` is."""


def read_arguments(given: Mapping[str, Any]) -> TransformersArguments:
    """The arguments as typed values. Raises UserError for a name or a value that there is not."""
    TRANSFORMERS.check(given)
    types = TRANSFORMERS.arguments()
    return TransformersArguments(**{name: types[name].convert(value) for name, value in given.items()})
