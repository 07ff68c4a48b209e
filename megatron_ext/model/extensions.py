"""Computations of some families beyond megatron-core's GPTModel, in its layer specs and at its embedding."""

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
    """A row-parallel projection with a norm of its output, under sequence parallelism too.

    A subclass, since checkpoints name the norm as a part of the projection.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        if self.bias is not None:
            raise NotImplementedError("a norm after a projection whose bias is added later")
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)
        # A hook, so that what others add to the projection goes before it.
        self.register_forward_hook(_normalise)


def _normalise(projection: NormedRowParallelLinear, _inputs: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    """The output [tokens, batch, hidden], whose bias is None, after the norm."""
    return projection.post_layernorm(output[0]), None


def check_transformer_engine_suffices(extensions: Extensions) -> None:
    """Raise UserError if a model wants other modules than a GPTModel: Transformer Engine's are used as they are.

    Its models have megatron-core's own router, which is extended with and without it.
    """
    modules = [each for each in fields(extensions) if each.name != "experts_in_group_score"]
    if wanted := [each.name for each in modules if getattr(extensions, each.name) != each.default]:
        raise UserError(
            f"the model needs {', '.join(wanted)}, which Transformer Engine's modules do not have: set"
            " megatron.transformer_impl=local"
        )


def extend_layer(layer: ModuleSpec, extensions: Extensions) -> ModuleSpec:
    """A layer of the local specs with soft-capped attention and with norms after attention and MLP, where wanted."""
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    if extensions.attention_softcap is not None:
        capped = ModuleSpec(attention.submodules.core_attention, params={"softcap": extensions.attention_softcap})
        attention = with_submodules(attention, core_attention=capped)
    if extensions.post_norms:
        attention = with_submodules(attention, linear_proj=NormedRowParallelLinear)
        mlp = with_submodules(mlp, linear_fc2=NormedRowParallelLinear)
    return with_submodules(layer, self_attention=attention, mlp=mlp)


def scale_embedding(model: GPTModel, factor: float | None) -> None:
    """Have the embedding multiplied by `factor` on the stages that compute it; None leaves it as it is."""
    if factor is not None and hasattr(model, "embedding"):
        dtype = model.embedding.word_embeddings.weight.dtype
        model.embedding.register_forward_hook(partial(_scale, torch.tensor(factor, dtype=dtype).item()))


def _scale(scale: float, _module: torch.nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
    return embedded * scale
