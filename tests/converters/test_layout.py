import pytest

from converters.boxes import Box
from converters.layout import Layout, Placement, Shard, check_tiling
from converters.layouts.huggingface import huggingface_layout


def shard(*boxes: Box, padding: tuple[Box, ...] = (), shape: tuple[int, ...] = (4, 6)) -> Shard:
    placements = [Placement("hf", Box.whole(box.shape), "local", box) for box in boxes]
    return Shard({"local": shape}, placements, [("local", box) for box in padding])


LEFT, RIGHT = Box((0, 0), (4, 3)), Box((0, 3), (4, 6))


def test_a_tensor_covered_once_passes():
    check_tiling(shard(LEFT, RIGHT))
    check_tiling(shard(LEFT, padding=(RIGHT,)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (shard(LEFT), "only 12 of the 24 elements of local"),
        (shard(LEFT, LEFT), "overlap"),
        (shard(LEFT, RIGHT, padding=(RIGHT,)), "overlap"),
        (shard(LEFT, Box((0, 3), (4, 7))), "leads out"),
        (Shard({}, shard(LEFT).placements), "does not hold"),
        (Shard({"local": (4, 3)}, [Placement("hf", Box((0, 0), (3, 4)), "local", LEFT)]), "a different shape"),
    ],
)
def test_anything_else_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        check_tiling(wrong)


def test_a_tensor_like_another_that_is_placed_otherwise_is_checked_too():
    good, gap = Placement("hf", LEFT, "a", LEFT), Placement("hf", LEFT, "b", LEFT)
    shapes = {"a": (4, 6), "b": (4, 6)}
    padding = [("a", RIGHT)]
    with pytest.raises(ValueError, match="only 12 of the 24 elements of b"):
        check_tiling(Shard(shapes, [good, gap], padding))
    moved = Placement("hf", RIGHT, "b", LEFT)
    check_tiling(Shard(shapes, [good, moved], [*padding, ("b", RIGHT)]))


def test_a_piece_of_a_placement_keeps_its_place():
    placement = Placement("hf", Box((2, 10), (4, 14)), "local", Box((7, 0), (9, 4)))
    assert placement.to_local(Box((3, 11), (4, 12))) == Box((8, 1), (9, 2))


def test_the_huggingface_layout_is_the_tensors_themselves():
    layout = huggingface_layout({"a": (2, 3), "b": ()})
    check_tiling(layout.shard(0))
    assert layout.ranks == 1
    assert layout.local_shapes(0) == {"a": (2, 3), "b": ()}
    assert [(p.hf_name, p.local_name, p.hf_box == p.local_box) for p in layout.placements(0)] == [
        ("a", "a", True),
        ("b", "b", True),
    ]
    assert layout.placements_of({"b"})(0) == layout.placements(0)[1:]


def test_a_rank_outside_the_layout_is_an_error():
    layout: Layout = huggingface_layout({"a": (1,)})
    with pytest.raises(IndexError, match="rank 1 of a layout of 1 ranks"):
        layout.shard(1)
