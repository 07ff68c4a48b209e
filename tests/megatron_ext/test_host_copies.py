"""A save in the background holds one copy of what its rank writes, and no more, however many there were before."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from launch import run_ranks
from test_checkpoint import DP2, make_model, train, write_model
from torch import Tensor

from converters.layouts.megatron import ParallelSizes
from megatron_ext import device
from megatron_ext.host_copies import HostCopies

ALIGNMENT_BYTES = 64


class Held:
    """Bytes of host memory that copies are in, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def memory(self, size_bytes: int) -> Tensor:
        """As `device.host_memory`; it is held as long as any tensor has a part of it."""
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


def test_copies_share_one_piece_and_a_longer_list_lets_go_of_it_first() -> None:
    with counted() as held:
        copies = HostCopies()
        for numbers in ((3, 1000), (1000, 3), (5, 4000), (1, 1)):
            tensors = [torch.full((number,), float(number)) for number in numbers]
            assert all(map(torch.equal, copies.of(tensors), tensors))
        assert held.now == held.most
        assert 4 * 4005 <= held.most <= 4 * 4005 + 2 * ALIGNMENT_BYTES


def saved_in_the_background(rank: int, sizes: ParallelSizes, folder: Path, target: Path) -> list[tuple[int, int, int]]:
    """After each of three saves: bytes that were held at most, those that were written, and in how many tensors."""
    from megatron_ext import checkpoint, checkpoint_writer

    model = make_model(rank, sizes, folder, reference=True, dtype=torch.bfloat16)
    found = []
    with counted() as held:
        saving = checkpoint.Saving(model)
        for number in range(3):
            train(model, range(number, number + 1))
            if number == 1:
                # The reference is another than that of the folder now, and is saved, too.
                model.refresh_reference()
            own = target / str(number)
            own.mkdir(parents=True, exist_ok=True)
            written: list[int] = []

            def framed(tensor: Tensor, sizes: list[int] = written, frame: Any = checkpoint_writer._framed) -> Any:
                sizes.append(tensor.nbytes)
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
            assert 0 < written <= held <= written + ALIGNMENT_BYTES * tensors
    # One of the two also writes the reference.
    assert len({held for saves in of_ranks for held, _, _ in saves}) > 1
