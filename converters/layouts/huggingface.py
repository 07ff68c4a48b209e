"""The layout of a HuggingFace checkpoint: one rank that holds every tensor as it is."""

from collections.abc import Mapping
from functools import partial

from converters.boxes import Box
from converters.layout import Layout, Placement, Shape, Shard


def huggingface_layout(hf_shapes: Mapping[str, Shape]) -> Layout:
    """The layout in which rank 0 holds the tensors `hf_shapes` under their own names."""
    return Layout(1, hf_shapes, partial(_shard, hf_shapes))


def _shard(hf_shapes: Mapping[str, Shape], rank: int) -> Shard:  # noqa: ARG001 (there is only one)
    placements = []
    for name, shape in hf_shapes.items():
        whole = Box.whole(shape)
        placements.append(Placement(name, whole, name, whole))
    return Shard(hf_shapes, placements)
