"""Keys of Megatron's distributed checkpoints (torch_dist).

If all layers are alike, a parameter has one key for all layers, with a leading dimension for the layer; if layers
differ, its key contains the layer's number. Experts add one more leading dimension. Keys are those of Transformer
Engine's modules.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from converters.architectures import Architecture, Parameter, Part

_LAYER, _EXPERTS = "decoder.layers.{layer}.", "mlp.experts."
_EXPERT_WEIGHT = "weight{expert}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One whole parameter of the model, at `index` in the leading dimensions of the tensor `key`."""

    parameter: Parameter
    key: str
    index: tuple[int, ...]
    leading: tuple[int, ...]
    """Sizes of the leading dimensions."""
    hf_names: tuple[str, ...]
    layer: int | None
    expert: int


def cells(architecture: Architecture, *, uniform: bool) -> Iterator[Cell]:
    """Yield every parameter in model order; if `uniform`, layers share their keys."""
    numbers = {Part.FIRST: [None], Part.LAYERS: range(architecture.num_layers), Part.LAST: [None]}
    first_mtp = architecture.num_layers
    numbers[Part.MTP] = range(first_mtp, first_mtp + architecture.mtp_layers)
    for part, layers in numbers.items():
        for layer in layers:
            for parameter in architecture.weight_map:
                if parameter.part is part and (layer is None or layer in parameter.layers):
                    yield from _experts(architecture, parameter, layer, uniform and part is Part.LAYERS)


def _experts(architecture: Architecture, parameter: Parameter, layer: int | None, stacked: bool) -> Iterator[Cell]:
    pattern = parameter.transformer_engine or parameter.megatron
    number = layer if parameter.part is not Part.MTP or layer is None else layer - architecture.num_layers
    if stacked:
        pattern = pattern.replace(_LAYER, "decoder.layers.")
    if parameter.is_expert:
        pattern = pattern.replace(_EXPERTS, _EXPERTS + "experts.").replace(_EXPERT_WEIGHT, "weight")
    key = pattern.format(layer=number)
    layer_index, layers = ((layer,), (architecture.num_layers,)) if stacked and layer is not None else ((), ())
    for expert in range(architecture.num_experts if parameter.is_expert else 1):
        hf_names = tuple(name.format(layer=layer, expert=expert) for name, _ in parameter.huggingface)
        index, leading = layer_index, layers
        if parameter.is_expert:
            index, leading = (*index, expert), (*leading, architecture.num_experts)
        yield Cell(parameter, key, index, leading, hf_names, layer, expert)


def has_uniform_layers(architecture: Architecture) -> bool:
    """Whether megatron-core treats all layers as alike: `moe_layer_freq` is not a list."""
    return architecture.transformer_config.get("moe_layer_freq", 1) == 1
