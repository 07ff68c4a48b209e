import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.boxes import Box, boxes_of_range, first_overlap

SHAPE = (4, 3, 5)


@st.composite
def boxes(draw, shape=SHAPE, empty=False):
    start, stop = [], []
    for length in shape:
        a = draw(st.integers(0, length if empty else length - 1))
        start.append(a)
        stop.append(draw(st.integers(a if empty else a + 1, length)))
    return Box(tuple(start), tuple(stop))


def elements(box: Box | None) -> set[tuple[int, ...]]:
    if box is None:
        return set()
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@given(boxes(empty=True), boxes(empty=True))
def test_intersection_has_the_elements_of_both(a, b):
    assert elements(a.intersect(b)) == elements(a) & elements(b)
    assert (a.intersect(b) is None) == (not elements(a) & elements(b))


@given(boxes(), boxes())
def test_subtraction_leaves_disjoint_boxes_of_what_is_left(a, b):
    inner = a.intersect(b)
    if inner is None:
        return
    rest = list(a.subtract(inner))
    assert set().union(*map(elements, rest)) == elements(a) - elements(inner)
    assert sum(box.size for box in rest) == a.size - inner.size


@given(boxes(empty=True))
def test_size_shape_and_slices_are_those_of_torch(box):
    taken = torch.zeros(SHAPE)[box.slices()]
    assert box.shape == tuple(taken.shape)
    assert box.size == taken.numel() == len(elements(box))


@given(boxes(), st.tuples(*[st.integers(0, 7)] * 3))
def test_shift_and_relative_to(box, offset):
    moved = box.shift(offset)
    assert moved.start == tuple(a + b for a, b in zip(box.start, offset, strict=True))
    assert moved.shape == box.shape
    assert box.relative_to(box) == Box.whole(box.shape)


@given(st.lists(boxes(empty=True), max_size=5))
def test_first_overlap_finds_two_boxes_that_share_an_element_if_there_are_any(some):
    overlap = first_overlap(some)
    if any(elements(a) & elements(b) for a, b in itertools.combinations(some, 2)):
        assert overlap is not None
        assert elements(overlap[0]) & elements(overlap[1])
    else:
        assert overlap is None


def test_a_tensor_without_dimensions_has_one_element():
    scalar = Box.whole(())
    assert scalar.size == 1
    assert scalar.intersect(scalar) == scalar
    assert list(scalar.subtract(scalar)) == []
    assert torch.tensor(3.0)[scalar.slices()] == 3.0
    assert first_overlap([scalar, scalar]) is not None


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_range_of_elements_is_a_few_boxes_in_order(shape, data):
    tensor = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    found = list(boxes_of_range(shape, start, stop))
    assert [element for box in found for element in tensor[box.slices()].flatten().tolist()] == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
