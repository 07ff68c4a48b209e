"""Whole weights and gradients that a rank has for a while under FSDP2, which keeps rows of them."""

from math import prod

from converters.architectures import Architecture, Parameter, Part
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.memory.rank_weights import part_shape, stage_parameters


def gathered_elements(architecture: Architecture, parallel: ParallelSizes) -> int:
    """Elements of whole weights and gradients at the most: when the backward pass of some layer ends.

    The output layer, and an embedding tied to it, stay whole to the end of the backward pass, and so do their
    gradients. A layer has its weights and its gradient by then; the weights of the one before it have been gathered
    ahead, and the gradient of the one after it is being reduced. The embedding is gathered as a layer is.
    """
    layers, embedding, kept = [0] * architecture.num_layers, 0, 0
    for parameter, _ in stage_parameters(architecture, parallel, 0):
        elements = _whole_elements(architecture, parallel, parameter)
        if parameter.part is Part.LAYERS:
            for layer in parameter.layers:
                layers[layer] += elements
        elif parameter.part is Part.FIRST:
            embedding += elements
        else:
            kept += elements
    if architecture.gpt_model["share_embeddings_and_output_weights"]:
        kept += embedding
    else:
        layers.insert(0, embedding)
    around = zip([0, *layers[:-1]], layers, [*layers[1:], 0], strict=True)
    return 2 * kept + max(before + 2 * own + after for before, own, after in around)


def _whole_elements(architecture: Architecture, parallel: ParallelSizes, parameter: Parameter) -> int:
    """Elements of a parameter in one layer, with the rows that fill up those of the last rank."""
    if parameter.is_buffer:
        return 0
    own = prod(part_shape(architecture, parallel, parameter, 0))
    return own * parallel.weight_copies * (architecture.num_experts if parameter.is_expert else 1)
