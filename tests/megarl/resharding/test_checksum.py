import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.resharding.direct import packing as module
from megarl.resharding.direct.packing import checksum, weighted_sum


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_on_the_host_it_is_a_crc_that_can_be_continued(first, second):
    memories = [torch.tensor(list(part), dtype=torch.uint8) for part in (first, second)]
    assert checksum(memories[1], checksum(memories[0])) == zlib.crc32(first + second)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), st.integers(0, 2**64 - 1))
def test_a_weighted_sum_is_its_formula_in_whole_numbers(words, before):
    memory = torch.tensor(words, dtype=torch.int32).view(torch.uint8)
    expected = (before * 6364136223846793005 + sum(word * at for at, word in enumerate(words, 1))) % 2**64
    assert weighted_sum(memory, before) == expected


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_WORDS", 8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-100, 100), min_size=20, max_size=40, unique=True), st.data())
def test_a_weighted_sum_sees_changed_and_moved_words(small_chunks, words, data):
    memory = torch.tensor(words, dtype=torch.int32)
    right = weighted_sum(memory.view(torch.uint8))
    first, second = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    changed = memory.clone()
    changed[first] += 1
    assert weighted_sum(changed.view(torch.uint8)) != right
    if first != second:
        changed = memory.clone()
        changed[[first, second]] = memory[[second, first]]
        assert weighted_sum(changed.view(torch.uint8)) != right
