"""Records of routed experts: small, whole, and refused where they are those of another model."""

import numpy as np
import pytest
import torch

from megatron_ext.packing.packing import RaggedBatch, pack
from megatron_ext.routing.routed_experts import Routing

DEEPSEEK_V3 = Routing(layers=58, topk=8, experts=256)


def bytes_of(records: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(records.view(np.uint8).reshape(len(records), records.itemsize))


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
    routing.check(bytes_of(records))
    layers = range(routing.layers)[::-1]
    found = routing.experts_of(bytes_of(records), layers)
    assert np.array_equal(found[:40].numpy(), experts[:, ::-1])
    assert found[40:].unique().tolist() == [-1]


def test_what_is_not_of_this_model_is_refused() -> None:
    routing = Routing(layers=2, topk=2, experts=4)
    experts = any_experts(routing, 5)
    with pytest.raises(ValueError, match="do not fit"):
        routing.records(experts, 4)
    with pytest.raises(ValueError, match="do not fit"):
        routing.records(experts[:, :1], 5)
    with pytest.raises(RuntimeError, match=r"have 2 bytes, and .* needs 4: engine and trainer have different models"):
        routing.check(torch.zeros(5, 2, dtype=torch.uint8))
    experts[3, 1] = (1, 4)
    with pytest.raises(RuntimeError, match="none of 4"):
        routing.check(bytes_of(routing.records(experts, 5)))
    experts[3, 1] = (1, 1)
    with pytest.raises(RuntimeError, match="less than 2 different experts"):
        routing.check(bytes_of(routing.records(experts, 5)))


def test_a_record_stays_with_the_token_that_is_fed_and_padding_has_none() -> None:
    records = torch.arange(5, dtype=torch.uint8)[:, None].expand(5, 2)
    batch = RaggedBatch(torch.arange(5, 10), torch.tensor([3, 2]), routed_experts=records)
    micro_batch = pack(batch, [1, 0], align=4)
    assert micro_batch.tokens.tolist() == [[8, 9, 5, 6, 7, 0, 0, 0]]
    assert micro_batch.routed_experts[:, 1].tolist() == [3, 4, 0, 1, 2, 255, 255, 255]
    assert pack(batch, [], align=4).routed_experts.tolist() == [[255, 255]] * 4
    with pytest.raises(ValueError, match="4 records of routed experts for 5 tokens"):
        RaggedBatch(batch.tokens, batch.lengths, routed_experts=records[:4])
