import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converters.boxes import Box
from converters.copying import copy_transfers
from converters.errors import UserError
from converters.layout import Layout, Placement, Shard
from converters.plan import plan
from megarl.resharding.direct.messages import ALIGNMENT_BYTES, cut_into_messages, digest, parts
from megarl.resharding.direct.packing import blocks, differing, pack, unpack
from megarl.resharding.direct.typed_transfers import plain

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NARROW = {torch.float32: [torch.float32, torch.bfloat16], torch.bfloat16: [torch.bfloat16, torch.float32]}


@given(st.lists(st.integers(1, 7), max_size=3).map(tuple), st.integers(1, 60))
def test_parts_are_contiguous_and_hold_every_element_once_in_order(shape, elements):
    numbers = torch.arange(math.prod(shape)).view(shape)
    found = [numbers[box.slices()].flatten() for box in parts(shape, elements)]
    assert torch.equal(torch.cat(found), numbers.flatten())
    assert all(len(part) <= elements for part in found)


@st.composite
def pairs(draw):
    """Two layouts of the same tensors: the source cuts them along rows, the destination along columns, each its way."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6))
    hf_shapes = {f"t{index}": shape for index, shape in enumerate(shapes)}
    source_dtypes = {f"s.{name}": draw(st.sampled_from(list(NARROW))) for name in hf_shapes}
    dtypes = {f"d.{name}": draw(st.sampled_from(NARROW[source_dtypes[f"s.{name}"]])) for name in hf_shapes}
    source, destination = (_cut(hf_shapes, prefix, axis) for prefix, axis in (("s", 0), ("d", 1)))
    return source, destination, source_dtypes, dtypes


def cut_plain(transfers, dtypes, bucket_bytes):
    return cut_into_messages((plain(transfer, dtypes) for transfer in transfers), bucket_bytes)


def _cut(hf_shapes, prefix, axis):
    """A rank with both halves of each tensor, the second before the first."""
    placements = []
    for name, shape in hf_shapes.items():
        half = shape[axis] // 2
        for start, stop, local in ((0, half, shape[axis] - half), (half, shape[axis], 0)):
            if start < stop:
                hf_box, local_box = (_interval(shape, axis, a, a + stop - start) for a in (start, local))
                placements.append(Placement(name, hf_box, f"{prefix}.{name}", local_box))
    shard = Shard({f"{prefix}.{name}": shape for name, shape in hf_shapes.items()}, placements)
    return Layout(1, hf_shapes, lambda rank: shard)


def _interval(shape, axis, start, stop):
    whole = Box.whole(shape)
    return Box(
        tuple(start if d == axis else 0 for d in range(2)), tuple(stop if d == axis else whole.stop[d] for d in (0, 1))
    )


def _filled(shapes, dtypes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtypes[name]) for name, shape in shapes.items()}


@given(pairs(), st.sampled_from([64, 130, 1000, 2**20]), st.booleans())
def test_messages_carry_what_a_copy_of_each_transfer_would(made, bucket_bytes, with_checksum):
    source, destination, source_dtypes, dtypes = made
    transfers = plan(source, destination)
    messages = cut_plain(transfers, dtypes, bucket_bytes)
    sources = _filled(source.local_shapes(0), source_dtypes, 0)
    expected = _filled(destination.local_shapes(0), dtypes, 1)
    copy_transfers(transfers, sources, expected)
    found = _filled(destination.local_shapes(0), dtypes, 2)
    for message in messages:
        assert message.size_bytes <= bucket_bytes
        assert all(piece.offset_bytes % ALIGNMENT_BYTES == 0 for piece in message.pieces)
        bucket = torch.full((bucket_bytes,), 255, dtype=torch.uint8)
        sums = [
            pack(blocks(message, bucket, sources, "source"), with_checksum=with_checksum),
            unpack(blocks(message, bucket, found, "destination"), with_checksum=with_checksum),
        ]
        assert sums[0] == sums[1]
        assert (sums[0] is not None) == with_checksum
        assert not list(differing(blocks(message, bucket, expected, "destination")))
        assert torch.equal(bucket[message.size_bytes :], torch.full_like(bucket[message.size_bytes :], 255))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@given(pairs(), st.sampled_from([64, 130, 1000]))
def test_messages_are_as_full_as_their_pieces_allow(made, bucket_bytes):
    source, destination, _, dtypes = made
    messages = cut_plain(plan(source, destination), dtypes, bucket_bytes)
    for message, following in pairwise(messages):
        assert message.size_bytes + following.pieces[0].size_bytes > bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES


@pytest.mark.parametrize("has_gaps", [False, True])
def test_a_large_tensor_is_checksummed_whole(has_gaps):
    shapes = {"t": (700, 1100)}
    layout = Layout(
        1, shapes, lambda rank: Shard(shapes, [Placement("t", *[Box.whole((700, 1100)), "t"], Box.whole((700, 1100)))])
    )
    (message,) = cut_plain(plan(layout, layout), {"t": torch.float32}, 2**22)
    tensors = {"t": torch.randn(700, 2200)[:, ::2] if has_gaps else torch.randn(700, 1100)}
    bucket = torch.zeros(message.size_bytes, dtype=torch.uint8)
    packed = blocks(message, bucket, tensors, "source")
    # Elements with gaps take a pass of torch's, in parts that stay in the processor's cache for the checksum.
    assert (len(packed) > 1) == has_gaps
    right = pack(packed, with_checksum=True)
    assert unpack(packed, with_checksum=True) == right
    for position in (0, 700 * 1100 * 4 // 2, 700 * 1100 * 4 - 1):
        bucket[position] ^= 1
        assert unpack(packed, with_checksum=True) != right
        assert list(differing(packed)) == []
        bucket[position] ^= 1


def test_differing_names_the_tensor_and_writes_nothing():
    shapes = {"a": (4, 4), "b": (4, 4)}
    whole = Box.whole((4, 4))
    layout = Layout(1, shapes, lambda rank: Shard(shapes, [Placement(name, whole, name, whole) for name in shapes]))
    (message,) = cut_plain(plan(layout, layout), dict.fromkeys(shapes, torch.float32), 1024)
    tensors = {name: torch.randn(4, 4) for name in shapes}
    tensors["a"][0, 0] = torch.nan
    bucket = torch.zeros(message.size_bytes, dtype=torch.uint8)
    pack(blocks(message, bucket, tensors, "source"), with_checksum=False)
    # The same NaN is no difference; a zero of the other sign is one.
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    assert list(differing(blocks(message, bucket, other, "destination"))) == []
    other["b"] = other["b"].t().contiguous()
    before = other["b"].clone()
    assert list(differing(blocks(message, bucket, other, "destination"))) == ["b"]
    assert torch.equal(other["b"], before)


def test_digests_tell_messages_apart():
    shapes = {"a": (4, 4)}
    whole = Box.whole((4, 4))
    layout = Layout(1, shapes, lambda rank: Shard(shapes, [Placement("a", whole, "a", whole)]))
    transfers = plan(layout, layout)
    found = {
        digest(cut_plain(transfers, {"a": dtype}, size))
        for dtype in (torch.float16, torch.bfloat16)
        for size in (64, 1024)
    }
    # 32 bytes: the bucket's size makes no difference to what is sent.
    assert len(found) == 2
    assert digest(cut_plain(transfers, {"a": torch.float32}, 64)) not in found


def test_a_bucket_for_not_even_one_element_is_refused():
    with pytest.raises(UserError, match=r"refit.bucket_bytes is 63, and the smallest piece of a message takes 64"):
        cut_plain([], {}, 63)


def test_a_box_outside_its_tensor_is_refused():
    shapes = {"a": (4, 4)}
    whole = Box.whole((4, 4))
    layout = Layout(1, shapes, lambda rank: Shard(shapes, [Placement("a", whole, "a", whole)]))
    (message,) = cut_plain(plan(layout, layout), {"a": torch.float32}, 64)
    with pytest.raises(ValueError, match=r"leads out of a, which has shape \[4, 3\]"):
        blocks(message, torch.zeros(64, dtype=torch.uint8), {"a": torch.zeros(4, 3)}, "source")
