"""The weight map of an architecture: which HuggingFace tensors make up which Megatron parameter, as data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal

import torch

from converters.architectures.extensions import Extensions
from converters.layout import Shape

Head = Literal["language_model", "value"]
"""Output computed from the last hidden states: logits over the vocabulary, or one number per token."""


class Kind(Enum):
    """How a Megatron parameter is assembled and sharded over tensor-parallel ranks."""

    REPLICATED = "the same on every rank"
    COLUMN = "dimension 0 is cut"
    ROW = "dimension 1 is cut"
    GATED = "gate and up, stacked in dimension 0 after each has been cut"
    QKV = "query, key and value, interleaved by key-value head in dimension 0, which is cut"
    VOCABULARY = "dimension 0 is padded so that it can be cut"


class Part(Enum):
    """Where in the pipeline a parameter lives."""

    FIRST = "on the first stage"
    LAYERS = "with its layer"
    LAST = "on the last stage"
    COPY_ON_LAST = "a copy, on a last stage that is not the first"
    MTP = "with its multi-token-prediction layer, on the last stage"


@dataclass(frozen=True)
class Dimension:
    """A named length: `units` units of `unit_size` elements.

    Sharding splits only between units, except for `Kind.QKV` with fewer key-value heads than ranks. `field` is the name
    that error messages give to `units`, usually that of a field of config.json.
    """

    field: str
    units: int
    unit_size: int = 1

    @property
    def size(self) -> int:
        """Length in elements."""
        return self.units * self.unit_size


@dataclass(frozen=True)
class Parameter:
    """One line of a weight map.

    `megatron` is the name in a GPTModel of megatron-core's local specs, `transformer_engine` the one
    with Transformer Engine's specs where it differs. Names may hold `{layer}` and `{expert}`: global
    indices in HuggingFace names, local ones in Megatron names. `huggingface` pairs each HuggingFace
    name, in the order of `kind`, with its shape in terms of the architecture's named dimensions.
    `layers` are the global indices of the layers that have it (`Part.LAYERS` and `Part.MTP` only);
    multi-token-prediction layers are numbered after the others.
    """

    megatron: str
    huggingface: tuple[tuple[str, tuple[str, ...]], ...]
    kind: Kind
    part: Part = Part.LAYERS
    layers: frozenset[int] = frozenset()
    transformer_engine: str | None = None
    float32: bool = False
    """Whether it stays in float32, regardless of the other weights' dtype."""
    is_buffer: bool = False
    """Whether it is a buffer, updated by rule: no optimizer trains it, and FSDP2 does not shard it."""

    @property
    def is_expert(self) -> bool:
        """Whether every routed expert has its own, sharded over expert-tensor-parallel ranks."""
        return "{expert}" in self.megatron


@dataclass(frozen=True)
class Architecture:
    """The Megatron model of a config.json."""

    model_type: str
    hf_config: Mapping[str, Any]
    transformer_config: dict[str, Any]
    """Fields of megatron-core's TransformerConfig, or MLATransformerConfig with `multi_latent_attention`."""
    gpt_model: dict[str, Any]
    """Keyword arguments of megatron-core's GPTModel; `vocab_size` without padding."""
    multi_latent_attention: bool
    num_experts: int
    dimensions: Mapping[str, Dimension]
    weight_map: tuple[Parameter, ...]
    hf_copies: Mapping[str, str] = field(default_factory=dict)
    """HuggingFace tensors that a checkpoint may contain as copies of another tensor (tied or shared weights)."""
    exported_copies: tuple[str, ...] = ()
    """Members of `hf_copies` that released checkpoints of the family hold and an export writes."""
    mtp_layers: int = 0
    """Multi-token-prediction layers: `model.layers.{num_layers + m}.` of HuggingFace is Megatron's `mtp.layers.{m}.`"""
    hf_unused: frozenset[str] = frozenset()
    """HuggingFace tensors a checkpoint may hold that no computation reads, and that are therefore not converted."""
    extensions: Extensions = field(default_factory=Extensions)
    """Computations of the model beyond a GPTModel."""
    head: Head = "language_model"
    hf_zero_if_missing: frozenset[str] = frozenset()
    """HuggingFace tensors that are 0 if a checkpoint lacks them: a head that is yet to be trained."""

    @property
    def num_layers(self) -> int:
        """Transformer layers, without multi-token prediction."""
        return self.transformer_config["num_layers"]

    @property
    def without_mtp(self) -> "Architecture":
        """The same model without layers for multi-token prediction."""
        return replace(self, mtp_layers=0)

    def dimensions_of(self, parameter: Parameter) -> list[list[Dimension]]:
        """The dimensions of the HuggingFace tensors of a parameter."""
        return [[self.dimensions[name] for name in shape] for _, shape in parameter.huggingface]

    @cached_property
    def hf_shapes(self) -> dict[str, Shape]:
        """Name -> shape of every tensor a checkpoint must hold, in the order of the model."""
        return {
            name: tuple(self.dimensions[dimension].size for dimension in shape) for name, shape, _ in self._hf_tensors()
        }

    def hf_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Name -> type of every tensor of a checkpoint whose weights are in `dtype`."""
        return {name: torch.float32 if parameter.float32 else dtype for name, _, parameter in self._hf_tensors()}

    def _hf_tensors(self) -> Iterator[tuple[str, tuple[str, ...], Parameter]]:
        yield from self._hf_tensors_of(Part.FIRST)
        for layer in range(self.num_layers):
            yield from self._hf_tensors_of(Part.LAYERS, layer)
        yield from self._hf_tensors_of(Part.LAST)
        for layer in range(self.num_layers, self.num_layers + self.mtp_layers):
            yield from self._hf_tensors_of(Part.MTP, layer)

    def _hf_tensors_of(self, part: Part, layer: int | None = None) -> Iterator[tuple[str, tuple[str, ...], Parameter]]:
        for parameter in self.weight_map:
            if parameter.part is not part or (layer is not None and layer not in parameter.layers):
                continue
            for expert in range(self.num_experts if parameter.is_expert else 1):
                for name, dimensions in parameter.huggingface:
                    yield name.format(layer=layer, expert=expert), dimensions, parameter
