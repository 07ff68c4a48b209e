"""Whole weights and gradients that a rank holds temporarily under FSDP2, which keeps rows of them."""

from math import prod

from converters.architectures import Architecture, Parameter, Part
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.memory.rank_weights import part_shape, stage_parameters

_IN_PREDICTING = ".transformer_layer."
"""In the names of what a layer of multi-token prediction has in common with the others."""


def gathered_elements(architecture: Architecture, parallel: ParallelSizes) -> int:
    """Most elements of whole weights and gradients, which is at the end of some layer's backward pass.

    The output layer, an embedding tied to it, and their gradients stay whole until the end of the backward pass. At the
    end of its backward pass, a layer has its weights and its gradient; the weights of the previous layer have been
    prefetched, and the gradient of the next layer is being reduced. The embedding is gathered like a layer. So are
    multi-token-prediction layers, whose norms and projection stay, and the embedding with them.
    """
    layers, embedding, kept = [0] * (architecture.num_layers + architecture.mtp_layers), 0, 0
    for parameter, times in stage_parameters(architecture, parallel, 0):
        elements = _whole_elements(architecture, parallel, parameter)
        if parameter.part is Part.LAYERS or (parameter.part is Part.MTP and _IN_PREDICTING in parameter.megatron):
            for layer in parameter.layers:
                layers[layer] += elements
        elif parameter.part is Part.FIRST:
            embedding += elements
        else:
            kept += elements * times
    # Layers of multi-token prediction look tokens up, too: the embedding is gathered from the first of them on.
    if architecture.gpt_model["share_embeddings_and_output_weights"] or architecture.mtp_layers:
        kept += embedding
    else:
        layers.insert(0, embedding)
    around = zip([0, *layers[:-1]], layers, [*layers[1:], 0], strict=True)
    return 2 * kept + max(before + 2 * own + after for before, own, after in around)


def _whole_elements(architecture: Architecture, parallel: ParallelSizes, parameter: Parameter) -> int:
    """Elements of a parameter in one layer, including rows that pad the last rank's."""
    if parameter.is_buffer:
        return 0
    own = prod(part_shape(architecture, parallel, parameter, 0))
    return own * parallel.weight_copies * (architecture.num_experts if parameter.is_expert else 1)
