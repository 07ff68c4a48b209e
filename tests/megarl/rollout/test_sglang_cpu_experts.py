"""Experts in SGLang on a CPU: those that a worker has, and products with adapters against weights that have them."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.rollout.sglang import cpu

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER, RANK, SLOTS = 5, 2, 3, 6, 4, 2, 2


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


W1, W2 = random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, HIDDEN, INNER)
GATE_UP_A, GATE_UP_B = random(SLOTS, EXPERTS, 2 * RANK, HIDDEN), random(SLOTS, EXPERTS, 2 * INNER, RANK)
DOWN_A, DOWN_B = random(SLOTS, EXPERTS, RANK, INNER), random(SLOTS, EXPERTS, HIDDEN, RANK)
HIDDEN_STATES, WEIGHTS = random(TOKENS, HIDDEN), random(TOKENS, TOP_K).sigmoid()
IDS = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]], dtype=torch.int32)
ADAPTERS = torch.tensor([1, -1, 0, 1, 0], dtype=torch.int32)
"""The slot of each token's adapter, -1 for none."""


def hooks_of(adapters: Tensor) -> SimpleNamespace:
    """Hooks as SGLang's `build_lora_hooks` makes them."""
    sorted_ids, experts, *_ = cpu.experts.adapters_of_tokens(IDS, SimpleNamespace(token_lora_mapping=adapters))
    shared = {"sorted_token_ids": sorted_ids, "expert_ids": experts, "top_k_num": TOP_K, "max_lora_rank": RANK}

    def after_gate_up(rows: Tensor, output: Tensor, weights: Tensor, _ids: Tensor) -> None:
        a, b = GATE_UP_A.split(RANK, 2), GATE_UP_B.split(INNER, 2)
        cpu.experts.add_updates(
            output=output, qcurr_hidden_states=rows, lora_a_stacked=a, lora_b_stacked=b, topk_weights=weights, **shared
        )

    def after_down(rows: Tensor, output: Tensor, weights: Tensor, _ids: Tensor) -> None:
        cpu.experts.add_updates(
            output=output,
            qcurr_hidden_states=rows,
            lora_a_stacked=[DOWN_A],
            lora_b_stacked=[DOWN_B],
            topk_weights=weights,
            mul_routed_weight=True,
            **shared,
        )

    return SimpleNamespace(after_gate_up=after_gate_up, after_down=after_down)


def by_experts(hooks: SimpleNamespace | None, **named: object) -> Tensor:
    arguments = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False, **named}
    return cpu.experts.multiply_by_experts(HIDDEN_STATES, W1, W2, WEIGHTS, IDS, None, hooks=hooks, **arguments)


def of_token(token: int, slot: int) -> Tensor:
    """The sum of one token's experts, with the adapter of a slot in their weights; -1 is none."""
    total = torch.zeros(HIDDEN, dtype=torch.float64)
    for expert, weight in zip(IDS[token].tolist(), WEIGHTS[token], strict=True):
        gate_up, down = W1[expert], W2[expert]
        if slot >= 0:
            pairs = zip(GATE_UP_B[slot, expert].split(INNER), GATE_UP_A[slot, expert].split(RANK), strict=True)
            gate_up = gate_up + torch.cat([b @ a for b, a in pairs])
            down = down + DOWN_B[slot, expert] @ DOWN_A[slot, expert]
        gate, up = (gate_up @ HIDDEN_STATES[token]).chunk(2)
        total += weight * (down @ (F.silu(gate) * up))
    return total


def test_the_experts_of_each_token_have_its_adapter() -> None:
    expected = [of_token(token, slot) for token, slot in enumerate(ADAPTERS.tolist())]
    torch.testing.assert_close(by_experts(hooks_of(ADAPTERS)), torch.stack(expected))


def test_experts_without_an_adapter_multiply_by_their_weights() -> None:
    torch.testing.assert_close(by_experts(None), torch.stack([of_token(token, -1) for token in range(TOKENS)]))


@pytest.mark.parametrize(
    "other", [{"activation": "gelu"}, {"is_gated": False}, {"apply_router_weight_on_input": True}], ids=str
)
def test_experts_of_other_kinds_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError, match="adapters of experts"):
        by_experts(None, **other)


class Chosen(NamedTuple):
    """As SGLang's StandardTopKOutput."""

    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: None = None


@pytest.mark.parametrize("held", [(0,), (1, 2), (0, 1, 2), ()])
def test_workers_that_share_experts_sum_to_the_outputs_of_all(held: tuple[int, ...]) -> None:
    """Also where both experts of a token, or none, are another worker's."""
    whole = by_experts(None)
    outputs = torch.zeros_like(whole)
    for experts in (held, tuple({0, 1, 2} - {*held})):
        # A worker numbers its own from 0 on.
        local = torch.full((EXPERTS,), -1, dtype=torch.int32)
        local[list(experts)] = torch.arange(len(experts), dtype=torch.int32)
        layer = SimpleNamespace(w1=W1[list(experts)], w2=W2[list(experts)])
        outputs += cpu.experts.leave_out_experts_of_others(
            in_torch, layer, HIDDEN_STATES, Chosen(WEIGHTS, local[IDS.long()]), None
        )
    torch.testing.assert_close(outputs, whole)


def in_torch(layer: SimpleNamespace, x: Tensor, chosen: Chosen, _config: None) -> Tensor:
    """As SGLang's `moe_forward_native`: an expert of a token counts once, each has a token, and -1 is none."""
    counts = torch.zeros(len(x), len(layer.w1), dtype=torch.int64).scatter_(1, chosen.topk_ids.long(), 1)
    assert counts.sum() == chosen.topk_ids.numel() > 0
    return cpu.experts.multiply_by_experts(
        x, layer.w1, layer.w2, chosen.topk_weights, chosen.topk_ids, hooks=None, activation="silu", is_gated=True,
        apply_router_weight_on_input=False,
    )  # fmt: skip
