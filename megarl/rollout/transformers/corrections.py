"""Corrections of transformers 5.19 where it computes otherwise than a model's config.json says, one function each."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from megarl.rollout.soft_cap import has_soft_cap, refuse_uncapped

_ATTENTION = "attn_implementation"
_NORMS_OF_LATENTS = (".q_a_layernorm", ".kv_a_layernorm")
_CAPPING = ("eager", "flex_attention", "flash_attention_2", "flash_attention_3")


def capping_attention(hf_config: Mapping[str, Any], given: str | None) -> str | None:
    """Return `given`, or the `attn_implementation` that caps attention scores if the model does.

    transformers' default, sdpa, ignores the cap. Raises UserError if the model caps scores and `given` does not.
    """
    if not has_soft_cap(hf_config):
        return given
    refuse_uncapped({_ATTENTION: given}, _CAPPING)
    return given or _CAPPING[0]


def give_norms_of_latents_the_epsilon(model: PreTrainedModel) -> None:
    """Set the epsilon of the norms inside latent attention to the model's, as trainer and engines do.

    transformers uses its own default, 1e-6, for DeepSeek's architecture; Moonlight's is 1e-5.
    """
    for name, module in model.named_modules():
        if name.endswith(_NORMS_OF_LATENTS):
            module.variance_epsilon = model.config.rms_norm_eps
