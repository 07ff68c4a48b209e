"""The rotary embedding of grouped-query attention (RoFormer, arXiv 2104.09864), in Megatron's terms."""

from typing import Any

from converters.architectures.hf_config import HuggingFaceConfig

# Constants of megatron-core 0.16.1's RotaryEmbedding, in which only the factor can be set.
_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary_embedding(config: HuggingFaceConfig, *, partial: float | None = None) -> dict[str, Any]:
    """Arguments of GPTModel for a plain rotary embedding, or one scaled as in Llama 3.1 (arXiv 2407.21783).

    `partial` is the family's default for the rotated share of each head; None if heads must be rotated whole.

    Raises UserError for a rotary embedding that Megatron cannot compute.
    """
    rope = config.rope
    kind, part = rope["rope_type"], rope.get("partial_rotary_factor", partial or 1.0)
    if kind not in ("default", "llama3"):
        raise config.error(f"has a rotary embedding of type {kind!r}, only 'default' and 'llama3' are supported")
    if partial is None and part != 1.0:
        raise config.error(f"has partial_rotary_factor = {part}, which is not supported: only 1.0 is")
    fields = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"], "rotary_percent": part}
    if kind == "default":
        return fields
    for name, constant in _LLAMA3_CONSTANTS.items():
        if (value := rope.get(name)) != constant:
            raise config.error(f"has a llama3 rotary embedding with {name} = {value}: only {constant} is supported")
    if rope.get("factor") is None:
        raise config.error("has a llama3 rotary embedding without a factor")
    return {**fields, "rope_scaling": True, "rope_scaling_factor": rope["factor"]}
