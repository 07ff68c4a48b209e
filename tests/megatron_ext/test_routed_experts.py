"""Records of routed experts: small, whole, and refused where they are those of another model."""

import numpy as np
import pytest
import torch

from megatron_ext.packing.packing import RaggedBatch, pack
from megatron_ext.routing.routed_experts import Records, Routing

DEEPSEEK_V3 = Routing(layers=58, topk=8, experts=256)


def all_of(*arrays: np.ndarray) -> Records:
    return Records(arrays, torch.arange(sum(map(len, arrays))))


def any_experts(routing: Routing, tokens: int) -> np.ndarray:
    """Expert numbers up to the last one, in any order."""
    scores = np.random.default_rng(1).random((tokens, routing.layers, routing.experts))
    return scores.argsort(-1)[..., -routing.topk :]


@pytest.mark.parametrize(
    ("routing", "record_bytes"),
    [(DEEPSEEK_V3, 464), (Routing(3, 1, 255), 3), (Routing(3, 1, 256), 6), (Routing(2, 8, 384), 32)],
)
def test_experts_come_back_and_tokens_without_any_say_so(routing: Routing, record_bytes: int) -> None:
    experts = any_experts(routing, 40)
    experts[0] = routing.experts - 1 - np.arange(routing.topk)
    records = routing.records(experts, 43)
    assert (records.shape, records.itemsize) == ((43,), record_bytes)
    layers = range(routing.layers)[::-1]
    found = routing.experts_of(all_of(records[:7], records[7:]), layers)
    assert np.array_equal(found[:40].numpy(), experts[:, ::-1])
    assert found[40:].unique().tolist() == [-1]


def test_tokens_have_the_records_that_are_theirs_and_those_behind_the_last_none() -> None:
    routing = Routing(layers=2, topk=2, experts=300)
    experts = any_experts(routing, 5)
    records = routing.records(experts, 5)
    found = routing.experts_of(Records((records[:2], records[2:]), torch.tensor([4, 5, 1, 900])), [1])
    assert found[:, 0].tolist() == [experts[4, 1].tolist(), [-1, -1], experts[1, 1].tolist(), [-1, -1]]
    assert routing.experts_of(Records((), torch.arange(3)), [0]).tolist() == [[[-1, -1]]] * 3


def test_what_is_not_of_this_model_is_refused() -> None:
    routing = Routing(layers=2, topk=2, experts=4)
    experts = any_experts(routing, 5)
    with pytest.raises(ValueError, match="do not fit"):
        routing.records(experts, 4)
    with pytest.raises(ValueError, match="do not fit"):
        routing.records(experts[:, :1], 5)
    with pytest.raises(RuntimeError, match=r"have 2 bytes, and .* needs 4: engine and trainer have different models"):
        routing.experts_of(all_of(np.zeros(5, "V2")), [1])
    experts[3, 1] = (1, 4)
    with pytest.raises(RuntimeError, match="none of 4"):
        routing.experts_of(all_of(routing.records(experts, 5)), [1])
    experts[3, 1] = (1, 1)
    with pytest.raises(RuntimeError, match="less than 2 different experts"):
        routing.experts_of(all_of(routing.records(experts, 5)), [1])
    # A record of which a layer alone says nothing is none that an engine makes.
    experts[3, 1] = 255
    with pytest.raises(RuntimeError, match="none of 4"):
        routing.experts_of(all_of(routing.records(experts, 5)), [1])
    # Ranks with the other layer have no use for it.
    routing.experts_of(all_of(routing.records(experts, 5)), [0])


def test_a_record_stays_with_the_token_that_is_fed_and_padding_has_none() -> None:
    routing = Routing(layers=1, topk=1, experts=9)
    records = routing.records(np.arange(5)[:, None, None], 5)
    batch = RaggedBatch(torch.arange(5, 10), torch.tensor([3, 2]), routed_experts=[[records[:3]], [records[3:]]])
    micro_batch = pack(batch, [1, 0], align=4)
    assert micro_batch.tokens.tolist() == [[8, 9, 5, 6, 7, 0, 0, 0]]
    assert routing.experts_of(micro_batch.routed_experts, [0]).flatten().tolist() == [3, 4, 0, 1, 2, -1, -1, -1]
    assert routing.experts_of(pack(batch, [], align=4).routed_experts, [0]).flatten().tolist() == [-1] * 4
    with pytest.raises(ValueError, match=r"\[3, 1\] records of routed experts for \[3, 2\] tokens"):
        RaggedBatch(batch.tokens, batch.lengths, routed_experts=[[records[:3]], [records[4:]]])
