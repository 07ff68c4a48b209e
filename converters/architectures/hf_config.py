"""Reads a HuggingFace config.json, as written by transformers 5 or an earlier version."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from converters.errors import UserError

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
MTP_LAYERS = "num_nextn_predict_layers"
"""Field that counts layers for multi-token prediction."""
_SMALLEST: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "head_dim"), 1),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1),
    **dict.fromkeys(("decoder_sparse_step", "sliding_window"), 1),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 0),
    MTP_LAYERS: 0,
}
"""Integer field -> its smallest valid value."""
_LARGEST: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", MTP_LAYERS), 1000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 10_000),
}
"""Integer field -> its largest valid value: the names of all tensors are in memory, which a wrong number would exhaust.
"""
_NUMBERS = (
    *("rms_norm_eps", "rope_theta", "partial_rotary_factor", "routed_scaling_factor"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
)
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "use_qk_norm", "norm_topk_prob"), bool),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), dict),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), list),
    "model_type": str,
}
_WORDS = {bool: "true or false", dict: "an object", list: "a list", str: "a name"}


def without_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config` of the same model without multi-token-prediction layers."""
    return {**config, MTP_LAYERS: 0} if config.get(MTP_LAYERS) else dict(config)


@dataclass(frozen=True)
class HuggingFaceConfig:
    """The fields of a config.json. A wrong or missing one raises UserError."""

    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The value of a required field."""
        if self.fields.get(name) is None:
            raise self.error(f"has no field {name}")
        return self._checked(name)

    def get(self, name: str, default: Any) -> Any:
        """The value of a field; `default` if it is missing or null."""
        return default if self.fields.get(name) is None else self._checked(name)

    def _checked(self, name: str) -> Any:
        value, smallest = self.fields[name], _SMALLEST.get(name)
        if smallest is not None and (type(value) is not int or value < smallest):
            raise self.error(f"has {name} = {value!r}, where a whole number of at least {smallest} belongs")
        if name in _LARGEST and value > _LARGEST[name]:
            raise self.error(f"has {name} = {value!r}, where at most {_LARGEST[name]} makes sense")
        if name in _NUMBERS and not _is_number(value):
            raise self.error(f"has {name} = {value!r}, where a number belongs")
        if type(value) is not _TYPES.get(name, type(value)):
            raise self.error(f"has {name} = {value!r}, where {_WORDS[_TYPES[name]]} belongs")
        return value

    def error(self, what: str) -> UserError:
        """A UserError saying that config.json `what`."""
        model_type = self.fields.get("model_type")
        return UserError(f"config.json{f' (model_type {model_type})' if model_type else ''} {what}")

    def require(self, name: str, supported: tuple[Any, ...], default: Any) -> None:
        """Raise UserError unless the field's value is in `supported`; `default` is what a missing field means."""
        if (value := self.get(name, default)) not in supported:
            options = " or ".join(repr(option) for option in supported)
            raise self.error(f"has {name} = {value!r}, which is not supported: only {options} is")

    @property
    def num_experts(self) -> int:
        """Number of routed experts, under any of the field's historical names."""
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if self.fields.get(name) is not None:
                return self[name]
        raise self.error("has no field num_experts")

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.get("tie_word_embeddings", False)

    @property
    def head_dim(self) -> int:
        """Width of an attention head; by default the hidden size divided by the heads."""
        return self.get("head_dim", self["hidden_size"] // self["num_attention_heads"])

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The MLP's activation function."""
        self.require("hidden_act", tuple(ACTIVATIONS), "silu")
        return ACTIVATIONS[self.get("hidden_act", "silu")]

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary embedding: `rope_theta`, `rope_type` and the parameters of that type.

        transformers 5 keeps all of it in `rope_parameters`; before, `rope_theta` and `partial_rotary_factor` were
        fields of their own and the rest `rope_scaling`, with the type under `type` or `rope_type`.
        """
        rope = {**self.get("rope_scaling", {}), **self.get("rope_parameters", {})}
        if self.fields.get("partial_rotary_factor") is not None:
            rope.setdefault("partial_rotary_factor", self.fields["partial_rotary_factor"])
        old_type = rope.pop("type", "default")
        rope.setdefault("rope_type", old_type)
        rope.setdefault("rope_theta", self.fields.get("rope_theta"))
        if rope["rope_theta"] is None:
            raise self.error("has no rope_theta, neither by itself nor in rope_parameters")
        if not _is_number(rope["rope_theta"]):
            raise self.error(f"has rope_theta = {rope['rope_theta']!r}, where a number belongs")
        return rope


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
