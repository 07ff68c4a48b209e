import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.boxes import Box
from converters.convert import copy_transfers
from converters.layout import Layout, Placement, Shard
from converters.plan import plan


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


@given(pairs())
def test_every_element_of_the_destination_is_written_once_from_the_right_element(layouts):
    source, destination = layouts
    transfers = plan(source, destination)
    values = coordinates(source.hf_shapes)
    for rank in range(destination.ranks):
        shapes = destination.local_shapes(rank)
        written = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        times = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        mine = [transfer for transfer in transfers if transfer.destination_rank == rank]
        for transfer in mine:
            times[transfer.destination_name][transfer.destination_box.slices()] += 1
            copy_transfers([transfer], held(source, transfer.source_rank, values), written)
        expected = held(destination, rank, values)
        for name in shapes:
            assert torch.equal(written[name], expected[name])
            assert torch.equal(times[name], (expected[name] > 0).long())


@given(pairs())
def test_the_same_layouts_give_the_same_plan(layouts):
    assert plan(*layouts) == plan(*layouts)


def whole_copies(ranks: int, names: int) -> Layout:
    shapes = {f"t{i}": (3, 5) for i in range(names)}
    whole = Box.whole((3, 5))
    return Layout(ranks, shapes, lambda _: Shard(shapes, [Placement(n, whole, n, whole) for n in shapes]))


def test_replicas_share_the_sending():
    transfers = plan(whole_copies(ranks=4, names=8), whole_copies(ranks=1, names=8))
    sent = [sum(t.source_box.size for t in transfers if t.source_rank == rank) for rank in range(4)]
    assert sent == [30, 30, 30, 30]


def test_an_element_that_no_source_holds_is_an_error():
    half = Placement("t0", Box((0, 0), (2, 5)), "t0", Box.whole((2, 5)))
    source = Layout(1, {"t0": (3, 5)}, lambda _: Shard({"t0": (2, 5)}, [half]))
    with pytest.raises(ValueError, match=r"no source rank holds .* of t0"):
        plan(source, whole_copies(1, 1))


def test_a_destination_with_a_gap_is_an_error():
    destination = Layout(1, {"t0": (3, 5)}, lambda _: Shard({"t0": (3, 5)}, []))
    with pytest.raises(ValueError, match="only 0 of the 15 elements of t0"):
        plan(whole_copies(1, 1), destination)


def test_layouts_of_different_models_are_an_error():
    other = Layout(1, {"t0": (5, 3)}, lambda _: Shard({}, []))
    with pytest.raises(ValueError, match="t0 has shape"):
        plan(other, whole_copies(1, 1))
