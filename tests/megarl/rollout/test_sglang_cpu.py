"""Corrections of SGLang on a CPU, as far as they are seen without it."""

import os
import struct
import subprocess
import sys
from contextlib import suppress

import psutil
import torch

from megarl.rollout.sglang import cpu
from megarl.rollout.sglang.parent import PARENT_VARIABLE

MASK = 0xFFFFFFFF


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of whole words."""

    def rotated(word: int, by: int) -> int:
        return ((word << by) | (word >> (32 - by))) & MASK

    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        state ^= rotated(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
        state = (rotated(state, 13) * 5 + 0xE6546B64) & MASK
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def test_the_reference_is_the_published_one() -> None:
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"\x21\x43\x65\x87") == 0xF55B516B


def test_random_numbers_are_hashes_of_seed_position_and_column() -> None:
    seeds = [0, 1, 2**63 - 1, 0x123456789ABCDEF0]
    positions, columns = [0, 7, 2**31 - 1, 513], [0, 1, 151_935]
    hashed = cpu.corrections.murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected
    unsigned = torch.tensor(seeds).to(torch.uint64)
    assert cpu.corrections.murmur_hash32(unsigned, torch.tensor(positions), torch.tensor(columns)).tolist() == expected


def test_places_of_tokens_go_into_the_pool_and_come_back() -> None:
    pool = torch.zeros(3, 8, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([0, 3]), torch.tensor([2, 6])
    places = torch.tensor([11, 12, 13, 14, 15])
    cpu.corrections._assign_to_pool(rows, pool, starts, ends, places, 8)
    assert pool[2, :2].tolist() == [11, 12]
    assert pool[0, 3:6].tolist() == [13, 14, 15]
    assert int(pool.count_nonzero()) == 5
    back = torch.zeros_like(places)
    cpu.corrections._take_from_pool(rows, pool, starts, ends, back, 8)
    assert torch.equal(back, places)


def pinned() -> list[torch.Tensor]:
    """Memory as SGLang's layers and products for adapters make it."""
    return [torch.tensor([3.0], pin_memory=True), torch.full((1,), 3.0).pin_memory()]


def test_memory_for_adapters_is_not_pinned() -> None:
    # Without a GPU torch would raise.
    assert [(each.item(), each.is_pinned()) for each in cpu.corrections.pin_nothing(pinned)] == [(3.0, False)] * 2


SERVER = """
import multiprocessing, sys, time
from types import SimpleNamespace

from megarl.rollout.sglang.cpu.corrections import fork_one_worker
from megarl.rollout.sglang.parent import end_with_parent

end_with_parent()
# As SGLang does.
multiprocessing.set_start_method("spawn", force=True)
fork_one_worker(None, SimpleNamespace(tp_size=2))
several = multiprocessing.get_start_method()
fork_one_worker(None, SimpleNamespace(tp_size=1))
worker = multiprocessing.Process(target=time.sleep, args=(300,))
worker.start()
print(several, multiprocessing.get_start_method(), worker.pid, flush=True)
worker.join()
"""
"""Starts a worker and prints how, and its number."""


def test_one_worker_is_forked_and_ends_with_its_server() -> None:
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    with subprocess.Popen([sys.executable, "-c", SERVER], env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        several, one, number = server.stdout.readline().split()
        worker = psutil.Process(int(number))
        server.kill()
    try:
        assert (several, one) == ("spawn", "fork")
        worker.wait(timeout=120)
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
