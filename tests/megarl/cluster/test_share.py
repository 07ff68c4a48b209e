"""Shares of a batch on the way to the ranks: small, and the same to the last bit when they arrive."""

import pickle

import numpy as np
import pytest
import torch

from megarl.cluster.share import Runs, Share, expanded, shortened
from megatron_ext.packing import RaggedBatch

NAN, OTHER_NAN = np.array([0x7FC00000, 0x7FC00001], dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        (np.float32([0.5] * 7 + [0.0] * 6), [7, 6]),
        # A zero with a sign is another value; what is not a number equals itself, by its bits.
        (np.float32([0.0] * 6 + [-0.0] * 6), [6, 6]),
        (np.array([NAN] * 6 + [OTHER_NAN] * 6, dtype=np.float32), [6, 6]),
        (np.array([True] * 20 + [False]), [20, 1]),
        (np.float32([0.5]), None),
        (np.float32([1, 2, 3, 4, 4, 4]), None),
        (np.float32([]), None),
    ],
)
def test_values_that_repeat_are_said_once_and_no_bit_changes(values: np.ndarray, runs: list[int] | None) -> None:
    short = shortened(values)
    assert (short.lengths.tolist() if isinstance(short, Runs) else None) == runs
    assert expanded(short).dtype == values.dtype
    assert expanded(short).tobytes() == values.tobytes()


def whole() -> RaggedBatch:
    """Twelve sequences of 1,000 to 2,100 tokens, with a weight and an advantage of each sequence."""
    lengths = 1000 + 100 * torch.arange(12)
    total, generator = int(lengths.sum()), torch.Generator().manual_seed(0)
    fields = {
        "weights": torch.rand(12, generator=generator).repeat_interleave(lengths),
        "advantages": torch.randn(12, generator=generator).repeat_interleave(lengths),
        "old_log_probs": -torch.rand(total, generator=generator),
    }
    tokens = torch.randint(150_000, (total,), generator=generator)
    return RaggedBatch(tokens, lengths, fields, unit=2, names={"response": torch.arange(12)})


def test_a_share_arrives_as_it_was_cut() -> None:
    batch, cut = whole(), [[2, 3, 10, 11], [0, 1]]
    share = pickle.loads(pickle.dumps(Share.of(batch, cut)))
    assert share.micro_batches == [[0, 1, 2, 3], [4, 5]]
    expected, arrived = batch.select([2, 3, 10, 11, 0, 1]), share.batch()
    assert torch.equal(arrived.tokens, expected.tokens)
    assert torch.equal(arrived.lengths, expected.lengths)
    assert list(arrived.fields) == list(expected.fields)
    assert all(torch.equal(arrived.fields[name], values) for name, values in expected.fields.items())
    assert arrived.names["response"].tolist() == [2, 3, 10, 11, 0, 1]
    assert arrived.unit == 2


def test_a_token_is_as_many_bytes_as_its_values_differ() -> None:
    batch = whole()
    everything = len(pickle.dumps(Share.of(batch, [list(range(12))]), protocol=5))
    assert everything < 8.2 * len(batch.tokens), "4 of the token, 4 of the log-prob"
    tokens_alone = len(pickle.dumps(Share.of(batch.only(["weights"]), [list(range(12))]), protocol=5))
    assert tokens_alone < 4.2 * len(batch.tokens)
