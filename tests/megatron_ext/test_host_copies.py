"""A save in the background holds one copy of what its rank writes, and no more, however many there were before."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launch import run_ranks
from test_checkpoint import DP2, make_model, train, write_model
from torch import Tensor

from converters.layouts.megatron import ParallelSizes
from megatron_ext import device
from megatron_ext.memory.host_copies import HostCopies, HostTensor, on_host

ALIGNMENT_BYTES = 64
BUCKET_BYTES = 2**12
"""Less than some tensors have, so that they are cut."""


class Held:
    """Bytes of host memory that copies are in, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.asked: list[int] = []

    def memory(self, size_bytes: int) -> Tensor:
        """As `device.host_memory`; it is held as long as any tensor has a part of it."""
        self.asked.append(size_bytes)
        buffer = _Buffer(max(1, size_bytes))
        self._add(size_bytes)
        weakref.finalize(buffer, self._add, -size_bytes)
        return torch.frombuffer(buffer, dtype=torch.uint8)[:size_bytes]

    def _add(self, size_bytes: int) -> None:
        self.now += size_bytes
        self.most = max(self.most, self.now)


class _Buffer(bytearray):
    """Bytes that can be seen to go."""


@contextmanager
def counted() -> Iterator[Held]:
    held = Held()
    with mock.patch.object(device, "host_memory", held.memory):
        yield held


def whole(copy: HostTensor) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8), *copy.pieces]).view(copy.dtype).view(copy.shape)


def pinned(asked: Sequence[int]) -> int:
    """Bytes that torch takes from the host for these: a power of two for each."""
    return sum(2 ** (size - 1).bit_length() for size in asked)


def test_copies_share_buckets_and_a_longer_list_adds_to_them() -> None:
    with counted() as held:
        copies = HostCopies(BUCKET_BYTES)
        for numbers in ((3, 1000), (1000, 3), (5, 4000), (0, 1)):
            before = len(held.asked)
            tensors = [torch.full((number,), float(number)) for number in numbers]
            assert all(map(torch.equal, map(whole, copies.of(tensors)), tensors))
            assert set(held.asked[before:]) <= {BUCKET_BYTES}
        assert 4 * 4005 <= held.now == sum(held.asked) == pinned(held.asked)
        assert held.now < 4 * 4005 + 2 * ALIGNMENT_BYTES + BUCKET_BYTES


def test_more_copies_go_behind_those_that_there_are() -> None:
    with counted() as held:
        copies = HostCopies(BUCKET_BYTES)
        tensors = [torch.full((number,), float(number)) for number in (3, 1000, 5, 4000)]
        made = [copy for tensor in tensors for copy in copies.more([tensor])]
        assert all(map(torch.equal, map(whole, made), tensors))
        assert held.now < sum(tensor.nbytes for tensor in tensors) + len(tensors) * ALIGNMENT_BYTES + BUCKET_BYTES
        (first,) = copies.of(tensors[:1])
        assert first.pieces[0].data_ptr() == made[0].pieces[0].data_ptr()


@pytest.mark.parametrize("state_bytes", [1, 2**28, 2**28 + 1, 35 * 10**9])
def test_what_is_pinned_is_the_state_and_less_than_a_bucket(state_bytes: int) -> None:
    asked: list[int] = []

    def host_memory(size_bytes: int) -> Tensor:
        asked.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device="meta")

    with mock.patch.object(device, "host_memory", host_memory):
        list(HostCopies().of([torch.empty(state_bytes, dtype=torch.uint8, device="meta")]))
    assert max(asked) == device.HOST_BUCKET_BYTES
    assert state_bytes <= pinned(asked) < state_bytes + device.HOST_BUCKET_BYTES


def test_copies_are_of_what_tensors_show_whatever_their_types_and_strides() -> None:
    tensors = [
        torch.arange(6.0).view(2, 3).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.arange(5000, dtype=torch.int64)[::2],
    ]
    for copied, on_it, tensor in zip(HostCopies(BUCKET_BYTES).of(tensors), map(on_host, tensors), tensors, strict=True):
        assert torch.equal(whole(copied), tensor)
        assert torch.equal(whole(on_it), tensor)


def saved_in_the_background(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> list[tuple[int, int, int]]:
    """After each of three saves: bytes that were held at most, those that were written, and in how many tensors."""
    from megatron_ext.checkpoint import checkpoint, checkpoint_writer

    model = make_model(rank, sizes, folder, reference=True, dtype=torch.bfloat16)
    found = []
    with counted() as held, mock.patch.object(checkpoint, "HostCopies", partial(HostCopies, BUCKET_BYTES)):
        saving = checkpoint.Saving(model)
        for number in range(3):
            train(model, range(number, number + 1))
            if number == 1:
                # The reference is another than that of the folder now, and is saved, too.
                model.refresh_reference()
            own = target / str(number)
            own.mkdir(parents=True, exist_ok=True)
            written: list[int] = []

            def framed(tensor: HostTensor, sizes: list[int] = written, frame: Any = checkpoint_writer._framed) -> Any:
                sizes.append(sum(map(len, tensor.pieces)))
                return frame(tensor)

            with mock.patch.object(checkpoint_writer, "_framed", framed):
                saving.begin(own, in_background=True)
                saving.finish()
            found.append((held.most, sum(written), len(written)))
    return found


def test_a_save_holds_one_copy_of_what_its_rank_writes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    of_ranks = run_ranks(saved_in_the_background, DP2, folder, tmp_path / "saved")
    for saves in of_ranks:
        for held, written, tensors in saves:
            assert 0 < written <= held < written + ALIGNMENT_BYTES * tensors + BUCKET_BYTES
    # One of the two also writes the reference.
    assert len({held for saves in of_ranks for held, _, _ in saves}) > 1
