"""The same model with a value for each token in place of an output layer: a critic, or a reward model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from converters.architectures.hf_config import without_mtp
from converters.architectures.weight_map import Architecture, Dimension, Head, Kind, Parameter, Part

_OUTPUT = "output_layer.weight"
_SCORE = "score.weight"
_CLASS_ENDS = ("ForCausalLM", "ForTokenClassification", "ForSequenceClassification")


def with_head(architecture: Architecture, head: Head) -> Architecture:
    """`architecture`, which has an output layer, with the given head."""
    return architecture if head == "language_model" else with_value_head(architecture)


def with_value_head(architecture: Architecture) -> Architecture:
    """The backbone of a language model with a linear layer [1, H] on top.

    Its HuggingFace form is that of `...ForSequenceClassification` with one label. A folder may lack `score.weight`, as
    a language model's does; it is then 0. The output layer and multi-token prediction layers of such a folder are not
    read.
    """
    value = Parameter("value_head.weight", ((_SCORE, ("labels", "hidden")),), Kind.REPLICATED, Part.LAST)
    changed = replace(
        architecture,
        hf_config=_hf_config(architecture.hf_config),
        head="value",
        transformer_config={k: v for k, v in architecture.transformer_config.items() if not k.startswith("mtp_")},
        gpt_model={**architecture.gpt_model, "share_embeddings_and_output_weights": False},
        dimensions={**architecture.dimensions, "labels": Dimension("num_labels", 1)},
        weight_map=(*(each for each in architecture.weight_map if each.megatron != _OUTPUT), value),
        hf_copies={},
        exported_copies=(),
        mtp_layers=0,
        hf_zero_if_missing=frozenset({_SCORE}),
        extensions=replace(architecture.extensions, output_softcap=None),
    )
    # The tensors of the tied or untied output layer and of multi-token prediction.
    unused = {"lm_head.weight", *architecture.hf_copies, *(architecture.hf_shapes.keys() - changed.hf_shapes.keys())}
    return replace(changed, hf_unused=architecture.hf_unused | unused)


def _hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    classes = [_classifier(name) for name in config.get("architectures") or []]
    labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    ends, padding = config.get("eos_token_id"), config.get("pad_token_id")
    # transformers takes the score of the last token that is not padding, and the head learns that of the end token.
    is_end = padding is not None and padding in (ends if isinstance(ends, list) else [ends])
    unpadded = {"pad_token_id": None} if is_end else {}
    return {**without_mtp(config), **({"architectures": classes} if classes else {}), **labels, **unpadded}


def _classifier(name: str) -> str:
    for end in _CLASS_ENDS:
        if name.endswith(end):
            return name.removesuffix(end) + "ForSequenceClassification"
    return name
