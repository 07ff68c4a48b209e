"""Random layouts, and what their ranks hold of tensors whose elements all differ."""

import torch
from hypothesis import strategies as st

from converters.boxes import Box
from converters.layout import Layout, Placement, Shard
from converters.plan import Cutting, Plan
from converters.topology import Topology


def tile(draw, box: Box, cuts: int) -> list[Box]:
    """Cut a box into disjoint boxes at random places."""
    boxes = [box]
    for _ in range(cuts):
        victim = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(victim.start) - 1))
        at = draw(st.integers(victim.start[axis], victim.stop[axis]))
        halves = (
            Box(victim.start, (*victim.stop[:axis], at, *victim.stop[axis + 1 :])),
            Box((*victim.start[:axis], at, *victim.start[axis + 1 :]), victim.stop),
        )
        boxes.extend(half for half in halves if half.size)
    return boxes


@st.composite
def layouts(draw, hf_shapes, replicas):
    """Each tensor cut into boxes, each box a local tensor of its own on `replicas` random ranks.

    Some boxes lie behind padding in their local tensor.
    """
    ranks = draw(st.integers(1, 4))
    shapes = [{} for _ in range(ranks)]
    placements = [[] for _ in range(ranks)]
    padding = [[] for _ in range(ranks)]
    for hf_name, shape in hf_shapes.items():
        for _ in range(replicas):
            for box in tile(draw, Box.whole(shape), draw(st.integers(0, 4))):
                rank = draw(st.integers(0, ranks - 1))
                rows = draw(st.integers(0, 2))
                name = f"{hf_name}.{len(placements[rank])}"
                shapes[rank][name] = (box.shape[0] + rows, *box.shape[1:])
                local = Box((rows, *(0,) * (len(shape) - 1)), shapes[rank][name])
                placements[rank].append(Placement(hf_name, box, name, local))
                if rows:
                    padding[rank].append((name, Box((0,) * len(shape), (rows, *box.shape[1:]))))
    shards = [Shard(*parts) for parts in zip(shapes, placements, padding, strict=True)]
    return Layout(ranks, hf_shapes, shards.__getitem__)


@st.composite
def pairs(draw):
    shape = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
    hf_shapes = {f"t{i}": s for i, s in enumerate(draw(st.lists(shape, min_size=1, max_size=3)))}
    replicas = draw(st.integers(1, 3))
    return draw(layouts(hf_shapes, replicas)), draw(layouts(hf_shapes, draw(st.integers(0, 2))))


def coordinates(hf_shapes):
    """Tensors whose every element says which element of which tensor it is."""
    values, first = {}, 1
    for name, shape in hf_shapes.items():
        size = torch.Size(shape).numel()
        values[name] = torch.arange(first, first + size).view(shape)
        first += size
    return values


def held(layout: Layout, rank: int, values) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in layout.local_shapes(rank).items()}
    for placement in layout.placements(rank):
        piece = values[placement.hf_name][placement.hf_box.slices()]
        tensors[placement.local_name][placement.local_box.slices()] = piece
    return tensors


@st.composite
def topologies(draw, source_ranks, destination_ranks):
    """Every rank on one of a few GPUs, two to a node."""
    gpu = st.integers(0, 5)
    source = draw(st.lists(gpu, min_size=source_ranks, max_size=source_ranks))
    destination = draw(st.lists(gpu, min_size=destination_ranks, max_size=destination_ranks))
    return Topology([g // 2 for g in source], source, [g // 2 for g in destination], destination)


@st.composite
def copies(draw):
    """A source and a destination of the same whole tensors, in some ranks of the destination twice."""
    names, shape = draw(st.integers(1, 6)), draw(st.sampled_from([(4, 2), (9,), (1, 3)]))
    destination = whole_copies(draw(st.integers(1, 4)), names, shape)
    twice = draw(st.sets(st.integers(0, 3)))
    shards = [destination.shard(rank) for rank in range(destination.ranks)]
    shards = [_doubled(shard) if rank in twice else shard for rank, shard in enumerate(shards)]
    source = whole_copies(draw(st.integers(1, 4)), names, shape)
    return source, Layout(destination.ranks, destination.hf_shapes, shards.__getitem__)


def _doubled(shard):
    copies = [Placement(p.hf_name, p.hf_box, f"{p.local_name}.copy", p.local_box) for p in shard.placements]
    shapes = dict(shard.local_shapes)
    return Shard(shapes | {f"{name}.copy": shapes[name] for name in shapes}, [*shard.placements, *copies])


@st.composite
def plans(draw):
    source, destination = draw(pairs() | copies())
    replicas = draw(st.integers(1, 3))
    topology = draw(st.none() | topologies(source.ranks, replicas * destination.ranks))
    cutting = Cutting(draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    return Plan(source, destination, replicas, topology, draw(st.booleans()), cutting)


def whole_copies(ranks: int, names: int, shape: tuple[int, ...] = (3, 5)) -> Layout:
    """Every rank holds the whole of every tensor."""
    shapes = {f"t{i}": shape for i in range(names)}
    whole = Box.whole(shape)
    return Layout(ranks, shapes, lambda _: Shard(shapes, [Placement(n, whole, n, whole) for n in shapes]))
