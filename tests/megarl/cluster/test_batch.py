"""Batches on the way to the ranks: small, fetched by those who compute, and the same to the last bit."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import OutOfDiskError

from megarl.cluster.trainer.batch import Batch, Placed, fetch_tensor, sequences_of
from megarl.cluster.workers.long_arrays import put_back, taken_out
from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.data.stretches import (
    RunLengthArray,
    StoredArray,
    StoreFull,
    Values,
    ValuesGone,
    fetch_concatenated,
    is_finite,
    put_sequences,
    run_length_encoded,
)
from megarl.schema import AlgorithmConfig
from megarl.stages.batch import to_batch
from megatron_ext.packing.packing import RaggedBatch
from megatron_ext.routing.routed_experts import Records, Routing

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
    short = run_length_encoded(values)
    assert (short.lengths.tolist() if isinstance(short, RunLengthArray) else None) == runs
    assert fetch_concatenated([(short,)]).dtype == values.dtype
    assert fetch_concatenated([(short,)]).tobytes() == values.tobytes()


@pytest.mark.usefixtures("shared_cluster")
def test_many_values_stay_together_in_the_object_store_until_they_are_read() -> None:
    values, lengths = -np.arange(30_000, dtype=np.float32), np.array([1, 9_999, 12_000, 7_998, 2])
    values[[0, 10_001]] = np.nan, np.inf
    values[22_000:22_064], values[29_998:] = 0.0, -0.0
    kept = put_sequences(values, lengths)
    assert [(each[-1].length, each[-1].start, each[-1].is_finite) for each in kept[:-1]] == [
        (1, 0, False),
        (9_999, 1, True),
        (12_000, 10_000, False),
        (7_934, 22_064, True),
    ]
    assert [list(map(type, each)) for each in kept] == [
        [StoredArray],
        [StoredArray],
        [StoredArray],
        [RunLengthArray, StoredArray],
        [RunLengthArray],
    ]
    assert len({each[-1].reference for each in kept[:-1]}) == 1
    assert (
        fetch_concatenated(kept[::-1]).tobytes()
        == np.concatenate(np.split(values, lengths.cumsum()[:-1])[::-1]).tobytes()
    )
    assert all(map(is_finite, put_sequences(np.abs(values[20_000:]), np.array([10_000]))))
    here = put_sequences(values[:5], np.array([2, 3]))
    assert [each.tobytes() for (each,) in here] == [values[:2].tobytes(), values[2:5].tobytes()]


@pytest.mark.usefixtures("shared_cluster")
def test_experts_of_a_long_turn_go_to_the_ranks_by_reference() -> None:
    """The prompt's records, which two samples share, are stored once; the controller is sent none."""
    tokens, routing = 4000, Routing(layers=4, topk=8, experts=128)
    experts = np.random.default_rng(0).random((tokens, 4, 128)).argsort(-1)[..., :8]
    of_prompt, of_response = routing.records(experts, tokens), routing.records(experts[1:], tokens)
    prompt, sampled = [5] * tokens, [7] * tokens
    turns = [
        Turn.of(prompt, sampled, [-1.0] * tokens, [3] * tokens, "stop", (of_prompt, of_response)) for _ in range(2)
    ]
    rest, arrays = taken_out(turns)
    assert sum(each.itemsize == 32 for each in arrays) == 2
    assert len(pickle.dumps(rest)) < 100_000, "12 bytes a token, of its numbers and log-probs"
    arrived = put_back(rest, [ray.put(each) for each in arrays])
    assert all(isinstance(each, StoredArray) for turn in arrived for each in turn.routed_experts)
    assert arrived == turns
    group = PromptGroup(Prompt(0, "any", prompt, "", {}), 0, [Trajectory((turn,), "stop") for turn in arrived])
    batch = to_batch([group], AlgorithmConfig(router_replay="rollout"))
    share = pickle.dumps(batch.select([1]).only(["routed_experts"]))
    assert len(share) < 40_000
    loaded = pickle.loads(share).load()
    assert loaded.fields == {}
    (arrays,) = loaded.routed_experts
    assert [each.flags.owndata for each in arrays] == [False, False], "both are read where they are stored"
    found = routing.experts_of(Records(arrays, torch.arange(2 * tokens)), range(4)).numpy()
    assert np.array_equal(found[:-1], np.concatenate([experts, experts[1:]]))
    assert "routed_experts" not in to_batch([group], AlgorithmConfig()).fields
    without = replace(group, trajectories=[Trajectory((replace(turns[0], routed_experts=()),), "stop")])
    with pytest.raises(RuntimeError, match="was asked for the experts of its tokens gave none"):
        to_batch([without], AlgorithmConfig(router_replay="rollout"))


def test_what_is_gone_from_the_object_store_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(references: list[str]) -> list[np.ndarray]:
        raise ray.exceptions.ObjectLostError(references[0], None, "")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ValuesGone, match="00ff"):
        fetch_concatenated([(StoredArray("00ff", "<f4", 5000, is_finite=True),)])


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
    drawn = torch.randint(256, (total, 6), dtype=torch.uint8, generator=generator).numpy().view("V6")[:, 0]
    records = [(each[:100], each[100:]) for each in np.split(drawn, lengths.cumsum(0)[:-1])]
    return RaggedBatch(tokens, lengths, fields, 2, {"response": torch.arange(12)}, records)


@pytest.mark.parametrize("chosen", [[2, 3, 10, 11, 0, 1], []])
def test_a_share_arrives_as_it_was_cut(chosen: list[int]) -> None:
    batch = whole()
    expected, arrived = batch.select(chosen), pickle.loads(pickle.dumps(Batch.of(batch).select(chosen))).load()
    assert torch.equal(arrived.tokens, expected.tokens)
    assert torch.equal(arrived.lengths, expected.lengths)
    assert list(arrived.fields) == list(expected.fields)
    for name, values in expected.fields.items():
        assert arrived.fields[name].dtype == values.dtype
        assert torch.equal(arrived.fields[name], values)
    assert len(arrived.routed_experts) == len(chosen)
    for found, wanted in zip(arrived.routed_experts, expected.routed_experts, strict=True):
        assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted]
    assert arrived.names["response"].tolist() == chosen
    assert arrived.unit == 2


def test_a_token_is_as_many_bytes_as_its_values_differ() -> None:
    batch = whole()
    everything = len(pickle.dumps(Batch.of(batch), protocol=5))
    assert everything < 14.7 * len(batch.tokens), "4 of the token, 4 of the log-prob, 6 of the experts"
    assert len(pickle.dumps(Batch.of(batch).only(["weights"]), protocol=5)) < 4.5 * len(batch.tokens)


def test_values_by_sequence_are_those_of_all_tokens() -> None:
    values, lengths = torch.tensor([1.0, 2, 2, 2, 2, 2, 3]), np.array([1, 5, 1])
    found: list[Values] = sequences_of(values, lengths)
    assert [fetch_concatenated([each]).tolist() for each in found] == [[1.0], [2.0] * 5, [3.0]]
    assert torch.equal(fetch_tensor(found), values)


@pytest.mark.parametrize(
    ("shares", "suit"),
    [
        ([[1, 0], [2, 3]], True),
        ([[2, 3], [0, 1], []], True),
        ([[0, 2], [1, 3]], False),
        ([[0], [1], [2, 3]], False),
        ([[0, 1, 2, 3]], False),
    ],
)
def test_shares_that_are_not_those_of_the_arrays_are_sent_what_there_was_before(shares, suit):
    tokens = [(np.array([place], dtype=np.int32),) for place in range(5)]
    arrays = [(np.array([-place], dtype=np.int32),) for place in range(5)]
    placed = Placed(tokens, np.array([0, 0, 1, 2, 2]))
    batch = Batch(np.ones(5, dtype=np.int64), arrays, placed=placed).select([0, 1, 4, 3])
    sent = pickle.loads(pickle.dumps(batch.for_shares(shares)))
    assert fetch_tensor(sent.tokens).tolist() == ([0, -1, -4, -3] if suit else [0, 1, 4, 3])
    assert sent.placed is None


def test_a_full_object_store_is_said_in_a_sentence(monkeypatch):
    def full(_values):
        raise OutOfDiskError("Local disk is full")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(StoreFull, match="Local disk is full") as error:
        put_sequences(np.zeros(10**5), np.array([10**5]))
    assert "raise cluster.object_store_bytes" in error.value.sentence
