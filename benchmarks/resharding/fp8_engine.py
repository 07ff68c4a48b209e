"""An engine with block FP8 weights that is sharded like Megatron: codes instead of values, and scales in addition."""

from collections.abc import Iterator

import torch

from converters.architectures import Architecture
from converters.layout import Layout, Placement, Shard
from converters.layouts.traced_layout import LoadTrace
from converters.number_formats import FP8_BLOCK


def fp8_traces(architecture: Architecture, layout: Layout) -> list[LoadTrace]:
    """Traces of such an engine's workers, from the layout of an engine in bfloat16."""
    return [_trace(architecture, layout, rank) for rank in range(layout.ranks)]


def _trace(architecture: Architecture, layout: Layout, rank: int) -> LoadTrace:
    hf_shapes, hf_dtypes = FP8_BLOCK.checkpoint(architecture)
    placements = [each for found in layout.placements(rank) for each in _with_scales(found, hf_shapes)]
    shapes = dict(layout.local_shapes(rank))
    for placement in placements:
        if placement.local_name not in shapes:
            of_codes = shapes[placement.local_name.removesuffix(FP8_BLOCK.scales_suffix)]
            shapes[placement.local_name] = tuple(
                -(-length // size) for length, size in zip(of_codes, FP8_BLOCK.block, strict=True)
            )
    dtypes: dict[str, torch.dtype] = {each.local_name: hf_dtypes[each.hf_name] for each in placements}
    return LoadTrace(Shard(shapes, placements, layout.shard(rank).padding), dtypes, [], {})


def _with_scales(placement: Placement, hf_shapes: dict[str, tuple[int, ...]]) -> Iterator[Placement]:
    yield placement
    if (scales := FP8_BLOCK.scales_name(placement.hf_name)) in hf_shapes:
        boxes = FP8_BLOCK.scales_box(placement.hf_box), FP8_BLOCK.scales_box(placement.local_box)
        yield Placement(scales, boxes[0], FP8_BLOCK.scales_name(placement.local_name), boxes[1])
