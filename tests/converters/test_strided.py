"""Boxes of views, against the elements that the views hold."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.boxes import Box
from converters.layouts.strided import Strided

LENGTHS = st.integers(1, 4)


@st.composite
def bases(draw):
    """A tensor of counted elements: dense or with gaps, and with its dimensions in any order in memory."""
    shape = draw(st.lists(LENGTHS, max_size=3))
    gaps = [draw(st.integers(0, 2)) for _ in shape]
    memory = torch.arange(2000)[draw(st.integers(0, 3)) :]
    strides, step = [0] * len(shape), 1
    for d in draw(st.permutations(range(len(shape)))):
        strides[d], step = step, step * (shape[d] + gaps[d])
    return memory.as_strided(shape, strides, memory.storage_offset())


@st.composite
def views(draw, base):
    view = base
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(
            st.sampled_from(["narrow", "select", "unsqueeze", "transpose", "step", "flatten", "split", "expand"])
        )
        if kind == "unsqueeze":
            view = view.unsqueeze(draw(st.integers(0, view.dim())))
        elif kind == "expand":
            view = view.expand(2, *view.shape)
        elif view.dim():
            d = draw(st.integers(0, view.dim() - 1))
            length = view.shape[d]
            if kind == "narrow":
                start = draw(st.integers(0, length - 1))
                view = view.narrow(d, start, draw(st.integers(1, length - start)))
            elif kind == "select":
                view = view.select(d, draw(st.integers(0, length - 1)))
            elif kind == "transpose":
                view = view.transpose(d, draw(st.integers(0, view.dim() - 1)))
            elif kind == "step":
                view = view[(slice(None),) * d + (slice(None, None, 2),)]
            elif kind == "flatten" and d and view.stride(d - 1) == length * view.stride(d):
                view = view.flatten(d - 1, d)
            elif kind == "split" and length % 2 == 0:
                view = view.unflatten(d, (2, length // 2))
    return view


def boxes_by_search(base, view):
    """All boxes of `base` whose elements, in order, are those of `view`."""
    elements = view.flatten().tolist()
    spans = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in base.shape]
    for chosen in torch.cartesian_prod(*map(torch.arange, map(len, spans))).view(-1, base.dim()).tolist():
        span = [options[i] for options, i in zip(spans, chosen, strict=True)]
        box = Box(tuple(a for a, _ in span), tuple(b for _, b in span))
        if base[box.slices()].flatten().tolist() == elements:
            yield box


@given(st.data())
def test_the_box_of_a_view_holds_its_elements_in_their_order(data):
    base = data.draw(bases())
    view = data.draw(views(base))
    found = Strided.of(base).box_of(Strided.of(view))
    expected = list(boxes_by_search(base, view)) if base.dim() else [Box((), ())] * (view.numel() == 1)
    assert ([] if found is None else [found]) == expected


def test_views_of_other_parts_of_the_memory_are_no_box():
    memory = torch.arange(30)
    base = memory[6:18].view(3, 4)
    assert Strided.of(base).box_of(Strided.of(memory[6:14].view(2, 4))) == Box((0, 0), (2, 4))
    for view in (memory[2:6], memory[2:10].view(2, 4), memory[18:22], memory[14:22].view(2, 4), memory[8:12]):
        assert Strided.of(base).box_of(Strided.of(view)) is None
    assert Strided.of(memory[::2]).box_of(Strided.of(memory[1:2])) is None
