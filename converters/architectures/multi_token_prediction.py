"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): layers that predict the tokens after the next."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from converters.architectures.weight_map import Dimension, Kind, Parameter, Part

_HF = "model.layers.{layer}."
_MEGATRON = "mtp.layers.{layer}."
_DECODER_LAYER, _MTP_TRANSFORMER_LAYER = "decoder.layers.{layer}.", _MEGATRON + "transformer_layer."
_INPUTS = "embedding_and_hidden"


@dataclass(frozen=True)
class MultiTokenPrediction:
    """Additions of multi-token-prediction layers to the Architecture fields of the same names."""

    weight_map: tuple[Parameter, ...] = ()
    dimensions: Mapping[str, Dimension] = field(default_factory=dict)
    hf_copies: Mapping[str, str] = field(default_factory=dict)
    """Their copies of the model's embedding and output layer, which released checkpoints contain."""
    transformer_config: Mapping[str, int] = field(default_factory=dict)


def multi_token_prediction(
    transformer_layer: Iterable[Parameter], layers: range, *, hidden_size: int, tied: bool
) -> MultiTokenPrediction:
    """Describe the layers that HuggingFace numbers `layers`, after those of the model; empty if there are none.

    Each consists of a decoder layer with the parameters `transformer_layer`, norms, a projection, and an embedding and
    output layer shared with the model; `tied` says whether these two are one. Megatron-core computes the layers on the
    last pipeline stage, which has a copy of the embedding for that.
    """
    if not layers:
        return MultiTokenPrediction()
    embedding = "model.embed_tokens.weight"
    output = embedding if tied else "lm_head.weight"
    copies = {"embed_tokens": embedding, "shared_head.head": output}
    return MultiTokenPrediction(
        weight_map=(
            Parameter(
                "embedding.word_embeddings.weight",
                ((embedding, ("vocabulary", "hidden")),),
                Kind.VOCABULARY,
                Part.COPY_ON_LAST,
            ),
            _parameter("enorm", "enorm", ("hidden",), Kind.REPLICATED, layers),
            _parameter("hnorm", "hnorm", ("hidden",), Kind.REPLICATED, layers),
            _parameter("eh_proj", "eh_proj", ("hidden", _INPUTS), Kind.COLUMN, layers),
            *(_moved(parameter, layers) for parameter in transformer_layer),
            _parameter("final_layernorm", "shared_head.norm", ("hidden",), Kind.REPLICATED, layers),
        ),
        dimensions={_INPUTS: Dimension("hidden_size", hidden_size, 2)},
        hf_copies={
            f"{_HF.format(layer=layer)}{copy}.weight": original for layer in layers for copy, original in copies.items()
        },
        transformer_config={"mtp_num_layers": len(layers)},
    )


def _parameter(name: str, hf_name: str, shape: tuple[str, ...], kind: Kind, layers: range) -> Parameter:
    return Parameter(
        f"{_MEGATRON}{name}.weight", ((f"{_HF}{hf_name}.weight", shape),), kind, Part.MTP, layers=frozenset(layers)
    )


def _moved(parameter: Parameter, layers: range) -> Parameter:
    """Convert a decoder layer's parameter to that of the transformer layer inside each multi-token-prediction layer."""
    te = parameter.transformer_engine
    return replace(
        parameter,
        megatron=parameter.megatron.replace(_DECODER_LAYER, _MTP_TRANSFORMER_LAYER),
        transformer_engine=te and te.replace(_DECODER_LAYER, _MTP_TRANSFORMER_LAYER),
        part=Part.MTP,
        layers=frozenset(layers),
    )
