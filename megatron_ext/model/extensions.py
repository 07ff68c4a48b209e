"""Computations of some model families that megatron-core's GPTModel lacks, added to its layer specs and embedding."""

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from converters.architectures.extensions import Extensions
from converters.errors import UserError
from megatron_ext.model.norms import RMSNorm
from megatron_ext.versions import with_submodules


class NormedRowParallelLinear(RowParallelLinear):
    """A row-parallel projection followed by a norm of its output, also with sequence parallelism.

    A subclass, since checkpoints name the norm as a part of the projection.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        if self.bias is not None:
            raise NotImplementedError("a norm after a projection whose bias is added later")
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)
        # A hook, so that the norm sees what other hooks, such as adapters, add to the projection.
        self.register_forward_hook(_normalise)


def _normalise(projection: NormedRowParallelLinear, _inputs: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    """Apply the norm to the output [tokens, batch, hidden], whose bias is None."""
    return projection.post_layernorm(output[0]), None


def check_transformer_engine_suffices(extensions: Extensions) -> None:
    """Raise UserError if a model needs modules that Transformer Engine does not have.

    The router is megatron-core's own with and without Transformer Engine, so its extension works with both.
    """
    modules = [each for each in fields(extensions) if each.name != "experts_in_group_score"]
    if wanted := [each.name for each in modules if getattr(extensions, each.name) != each.default]:
        raise UserError(
            f"the model needs {', '.join(wanted)}, which Transformer Engine's modules do not have: set"
            " megatron.transformer_impl=local"
        )


def extend_layer(layer: ModuleSpec, extensions: Extensions) -> ModuleSpec:
    """Add soft-capped attention, and norms after attention and MLP, to a layer of the local specs, if wanted."""
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    if extensions.attention_softcap is not None:
        capped = ModuleSpec(attention.submodules.core_attention, params={"softcap": extensions.attention_softcap})
        attention = with_submodules(attention, core_attention=capped)
    if extensions.post_norms:
        attention = with_submodules(attention, linear_proj=NormedRowParallelLinear)
        mlp = with_submodules(mlp, linear_fc2=NormedRowParallelLinear)
    return with_submodules(layer, self_attention=attention, mlp=mlp)


def scale_embedding(model: GPTModel, factor: float | None) -> None:
    """Multiply the embedding by `factor` on the stages that compute it; None leaves it unchanged."""
    if factor is not None and hasattr(model, "embedding"):
        dtype = model.embedding.word_embeddings.weight.dtype
        model.embedding.register_forward_hook(partial(_scale, torch.tensor(factor, dtype=dtype).item()))


def _scale(scale: float, _module: torch.nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
    return embedded * scale
