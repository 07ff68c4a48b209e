"""Large pieces that are contiguous at both ends go from tensor to tensor, and all rules of a transfer hold for them."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from converters.boxes import Box
from megarl.resharding.direct import sender as sending
from megarl.resharding.direct.connections import TransferError
from megarl.resharding.direct.messages import cut_into_messages
from megarl.resharding.direct.receiver import Receiver
from megarl.resharding.direct.sender import Sender
from megarl.resharding.direct.transports.endpoint import Rendezvous
from megarl.resharding.direct.typed_transfers import TypedTransfer
from megarl.resharding.direct.zero_copy import SMALLEST_BYTES
from megatron_ext.loopback import LOOPBACK

ROWS, COLUMNS = 512, SMALLEST_BYTES // 256
ODD = SMALLEST_BYTES // 2 + 7
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def typed_transfer(name, source, destination, dtype=BFLOAT16):
    return TypedTransfer(name, Box(*source), name, Box(*destination), dtype)


# Each piece that is not cut has 2 x SMALLEST_BYTES or more.
PARCELS = [
    typed_transfer("small", ((0, 0), (8, 8)), ((0, 0), (8, 8))),
    # No multiples of what pieces are aligned to, as the next: behind each lie bytes that are of no tensor.
    typed_transfer("odd", ((0, 0), (1, ODD)), ((0, 0), (1, ODD))),
    typed_transfer("also odd", ((0, 0), (1, ODD)), ((0, 0), (1, ODD))),
    typed_transfer("odd and small", ((0, 0), (1, 5)), ((0, 0), (1, 5))),
    # Rows in the midst of the source's, first ones of the destination's.
    typed_transfer("rows", ((128, 0), (384, COLUMNS)), ((0, 0), (256, COLUMNS))),
    typed_transfer("columns", ((0, 0), (ROWS, COLUMNS // 2)), ((0, 0), (ROWS, COLUMNS // 2))),
    typed_transfer("into columns", ((0, 0), (ROWS, COLUMNS // 2)), ((0, 8), (ROWS, 8 + COLUMNS // 2))),
    typed_transfer("converted", ((0, 0), (ROWS, COLUMNS)), ((0, 0), (ROWS, COLUMNS)), FLOAT32),
    typed_transfer("transposed", ((0, 0), (ROWS, COLUMNS)), ((0, 0), (ROWS, COLUMNS))),
    typed_transfer("whole", ((0, 0), (ROWS, COLUMNS)), ((0, 0), (ROWS, COLUMNS))),
]
ZERO_COPY = {"odd", "also odd", "rows", "whole"}


def source_tensors():
    made = {name: torch.randn(ROWS, COLUMNS, dtype=BFLOAT16) for name in (each.source_name for each in PARCELS)}
    return made | {
        "small": torch.randn(8, 8, dtype=BFLOAT16),
        "odd": torch.randn(1, ODD, dtype=BFLOAT16),
        "also odd": torch.randn(1, ODD, dtype=BFLOAT16),
        "odd and small": torch.randn(1, 5, dtype=BFLOAT16),
        "into columns": torch.randn(ROWS, COLUMNS // 2).bfloat16(),
    }


def destination_tensors():
    made = {each.destination_name: torch.zeros(ROWS, COLUMNS, dtype=each.dtype) for each in PARCELS}
    return made | {
        "small": torch.zeros(8, 8, dtype=BFLOAT16),
        "odd": torch.zeros(1, ODD, dtype=BFLOAT16),
        "also odd": torch.zeros(1, ODD, dtype=BFLOAT16),
        "odd and small": torch.zeros(1, 5, dtype=BFLOAT16),
        "transposed": torch.zeros(COLUMNS, ROWS, dtype=BFLOAT16).T,
    }


@contextmanager
def transfer(transport="rdma", with_checksum=True, with_changes=False):
    """A sender and a receiver that have met, their tensors, and a way to let both make a refit."""
    there, here = source_tensors(), destination_tensors()
    messages = cut_into_messages(PARCELS, 5 * SMALLEST_BYTES)
    sender = Sender(0, {0: messages}, there, LOOPBACK)
    rendezvous = Rendezvous(
        transport,
        b"key",
        [sender.address],
        None,
        destinations=1,
        timeout_s=20.0,
        with_checksum=with_checksum,
        with_changes=with_changes,
    )
    receiver = Receiver(0, {0: messages}, here, rendezvous)
    with ThreadPoolExecutor(2) as pool:

        def refit(version):
            sending = pool.submit(sender.send, version)
            try:
                receiver.receive(version)
            finally:
                # Closed before it hears of a failure, it would wait for an answer until its time is over.
                sending.exception()
            return sending.result()

        try:
            connecting = pool.submit(sender.connect, rendezvous)
            receiver.connect()
            connecting.result()
            yield sender, receiver, there, here, refit
        finally:
            sender.close()
            receiver.close()


def move(storage):
    """Let a storage have other memory; what is where it was."""
    address, size, others = storage.data_ptr(), storage.nbytes(), []
    # The allocator gives the same memory again until another has taken it.
    for _ in range(100):
        storage.resize_(0)
        others.append(torch.ones(size, dtype=torch.uint8))
        storage.resize_(size)
        if storage.data_ptr() != address:
            return others
    raise AssertionError("no other memory was given")


def differing(there, here):
    return {
        each.source_name
        for each in PARCELS
        if not torch.equal(
            there[each.source_name][each.source_box.slices()].to(each.dtype),
            here[each.destination_name][each.destination_box.slices()],
        )
    }


def zero_copy_names(receiver):
    messages = receiver._messages[0]
    found = receiver._zero_copy[0]
    return {messages[number].pieces[place].source_name for number, places in found.items() for place in places}


@pytest.mark.parametrize("with_checksum", [True, False])
def test_what_is_large_and_contiguous_at_both_ends_skips_the_buckets(with_checksum):
    with transfer(with_checksum=with_checksum) as (sender, receiver, there, here, refit):
        assert zero_copy_names(receiver) == ZERO_COPY
        everything = set(there)
        # To compare, all of it goes into buckets, and nothing is written.
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(sender.send, 1)
            assert (receiver.compare(1), differing(there, here)) == (everything, everything)
            sent.result()
        for version in (2, 3):
            there["whole"][-1, -1] += version
            there["rows"][200, 3] += version
            refit(version)
            assert differing(there, here) == set()
        for block in (block for views in sender._views.values() for block in views):
            assert not ZERO_COPY.intersection(block.names), "nothing of it was packed"
        # Weights of an engine that slept lie elsewhere, in memory that is not registered.
        others = [other for name in ("odd", "whole") for other in move(here[name].untyped_storage())]
        refit(4)
        assert differing(there, here) == set()
        assert all(each.eq(1).all() for each in others)


def test_changes_are_made_of_whole_messages():
    with transfer(with_changes=True) as (_, receiver, there, here, refit):
        assert zero_copy_names(receiver) == ZERO_COPY
        refit(1)
        there["whole"][0, 0] += 1
        assert refit(2).size_bytes < SMALLEST_BYTES
        assert differing(there, here) == set()
        # Memory that is no more where it was registered is not read.
        there["whole"].share_memory_().add_(1)
        refit(7)
        assert differing(there, here) == set()


def test_where_only_buckets_can_be_read_nothing_skips_them():
    with transfer("shared_memory") as (_sender, receiver, there, here, refit):
        assert zero_copy_names(receiver) == set()
        refit(1)
        assert differing(there, here) == set()


@pytest.mark.parametrize("name", sorted(ZERO_COPY))
def test_a_byte_that_is_another_when_it_comes_is_found(monkeypatch, name):
    with transfer() as (_sender, _receiver, there, _here, refit):
        pack = sending.pack

        def pack_and_change(*arguments, **options):
            checksum = pack(*arguments, **options)
            there[name].view(-1)[there[name].numel() // 2] += 1
            return checksum

        monkeypatch.setattr(sending, "pack", pack_and_change)
        with pytest.raises(TransferError, match="with checksum"):
            refit(1)
