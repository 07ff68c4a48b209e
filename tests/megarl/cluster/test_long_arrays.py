"""Results on their way between processes: which arrays are in the pickled bytes, and which are not."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from megarl.cluster.workers.long_arrays import put_back, taken_out
from megarl.data import Turn
from megarl.data.stretches import StoredArray, fetch


def turn(tokens: int) -> Turn:
    token_ids = np.arange(tokens, dtype=np.int32)
    return Turn.of([5, 9], token_ids, -token_ids.astype(np.float32), np.full(tokens, 3), "stop")


@pytest.mark.parametrize("tokens", [1, 100, 2047, 2048, 9000, 25_599])
def test_arrays_of_answers_are_copied_only_where_they_are_short(tokens: int) -> None:
    rest, arrays = taken_out([turn(tokens), turn(tokens)])
    buffers: list[pickle.PickleBuffer] = []
    # As Ray sends it.
    pickled = pickle.dumps(rest, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    between = 3 * (-4 * tokens % 8)
    assert sum(each.raw().nbytes for each in buffers) == (16 * tokens + between if tokens >= 2048 else 0)
    assert len(pickled) < 1000 + (16 * tokens if tokens < 2048 else 0)
    arrived = put_back(pickle.loads(pickled, buffers=[each.raw().toreadonly() for each in buffers]), [])
    assert (arrived, arrays) == ([turn(tokens)] * 2, [])


@pytest.mark.parametrize("text", ["\ud800 caf\u00e9" * 2000, "x" * 8193, "short"])
def test_a_long_text_is_among_the_arrays_that_are_not_copied(text: str) -> None:
    turns = [replace(turn(tokens), text=text) for tokens in (2049, 2050)]
    rest, _ = taken_out(turns)
    arrived = put_back(rest, [])
    assert [each.text for each in arrived] == [text] * 2
    assert arrived == turns
    assert all(each.token_ids.flags.aligned for each in arrived), "whatever the bytes of the text before"
    assert len(rest.pickled) < 1000


def test_long_arrays_are_referred_to() -> None:
    rest, arrays = taken_out(turn(25_600))
    arrived = put_back(rest, ["a", "b"])
    assert arrived.token_ids == StoredArray("a", "<i4", 25_600, is_finite=True)
    assert arrived.log_probs == StoredArray("b", "<f4", 25_600, is_finite=True)
    assert [each.tolist() for each in arrays] == [
        fetch(turn(25_600).token_ids).tolist(),
        turn(25_600).log_probs.tolist(),
    ]
