"""Everything in which transformers 5.19 computes otherwise than a model's config.json says, one function each."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from megarl.rollout.soft_cap import has_soft_cap, refuse_uncapped

_ATTENTION = "attn_implementation"
_NORMS_OF_LATENTS = (".q_a_layernorm", ".kv_a_layernorm")
_CAPPING = ("eager", "flex_attention", "flash_attention_2", "flash_attention_3")


def capping_attention(hf_config: Mapping[str, Any], given: str | None) -> str | None:
    """The `attn_implementation`, with `given`, that caps scores if the model does.

    transformers takes sdpa by itself, which drops the cap that it is given. Raises UserError where that is `given`.
    """
    if not has_soft_cap(hf_config):
        return given
    refuse_uncapped({_ATTENTION: given}, _CAPPING)
    return given or _CAPPING[0]


def give_norms_of_latents_the_epsilon(model: PreTrainedModel) -> None:
    """Give the norms inside latent attention the epsilon of the model, as trainer and engines do.

    transformers makes them with its own, 1e-6, in DeepSeek's models; Moonlight's is 1e-5.
    """
    for name, module in model.named_modules():
        if name.endswith(_NORMS_OF_LATENTS):
            module.variance_epsilon = model.config.rms_norm_eps
