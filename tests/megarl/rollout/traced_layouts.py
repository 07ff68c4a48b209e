"""Comparisons of traces of vLLM's loader."""

import torch

from converters.layouts.engine import engine_layout


def held_elements(shard, hf_shapes):
    """HuggingFace name -> a mask of the elements that the shard holds."""
    masks = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in hf_shapes.items()}
    for placement in shard.placements:
        masks[placement.hf_name][placement.hf_box.slices()] = True
    return masks


def different(architecture, traces, parallel):
    """The HuggingFace tensors of which some rank does not hold the same elements as in the layout of the plan."""
    expected = engine_layout(architecture, parallel)
    names = set()
    for rank, trace in enumerate(traces):
        traced = held_elements(trace.shard, architecture.hf_shapes)
        formula = held_elements(expected.shard(rank), architecture.hf_shapes)
        names |= {name for name in traced if not torch.equal(traced[name], formula[name])}
    return names
