"""Models with soft-capped attention scores, and the engine arguments that are refused for them.

Most attention kernels silently omit the cap. No check of weights notices, and the engine then samples from another
model than the one trained.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.architectures import read_architecture
from megarl.rollout.argument_values import PREFIX
from megatron_ext.options.refusal import Refusal, refuse

_WITH_CAP = " with a model that caps scores of attention (attn_logit_softcapping in its config.json)"
_REASON = "it leaves the cap out, or is not known to have one, and the engine would sample from another model"


def has_soft_cap(hf_config: Mapping[str, Any]) -> bool:
    """Whether the model with this config.json soft-caps its attention scores."""
    return read_architecture(hf_config).extensions.attention_softcap is not None


def refuse_uncapped(chosen: Mapping[str, Any], capping: Collection[str]) -> None:
    """Raise UserError for the first of the `chosen` arguments whose value is not in `capping`."""
    refuse(chosen, dict.fromkeys(chosen, Refusal(_REASON, (None, *capping))), PREFIX, _WITH_CAP)
