"""Checksums of blocks on the host."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.resharding.kernels import Block, gather, scatter

BEFORE = 7


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_on_the_host_it_is_a_crc_that_can_be_continued(first, second):
    memories = [torch.tensor(list(part), dtype=torch.uint8) for part in (first, second)]
    for kernel in (gather, scatter):
        blocks = [Block(memory.clone(), [], [], []) for memory in memories]
        assert kernel(blocks[1], kernel(blocks[0], 0)) == zlib.crc32(first + second)


def test_it_is_of_what_was_packed_and_of_what_is_unpacked():
    sent = torch.arange(100, dtype=torch.uint8)
    bucket = torch.zeros_like(sent)
    assert gather(Block(bucket, [bucket], [sent], ["a"]), BEFORE) == zlib.crc32(bytes(sent.tolist()), BEFORE)
    bucket[3] += 1
    received = torch.zeros_like(sent)
    assert scatter(Block(bucket, [bucket], [received], ["a"]), BEFORE) == zlib.crc32(bytes(bucket.tolist()), BEFORE)
    assert torch.equal(received, bucket)


@pytest.mark.parametrize("kernel", [gather, scatter])
def test_none_is_taken_where_none_is_asked_for(kernel):
    assert kernel(Block(torch.zeros(10, dtype=torch.uint8), [], [], []), None) is None
