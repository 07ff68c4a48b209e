"""Latent attention in SGLang on a CPU: adapters of kv_b_proj against B A itself, and what its codes stand for."""

from types import SimpleNamespace

import pytest
import torch

from converters.number_formats import FP8_BLOCK, INT8_CHANNEL, NumberFormat
from megarl.rollout.sglang import cpu

TOKENS, HEADS, KEYS, VALUES, LATENT, RANK, SLOTS = 5, 2, 3, 4, 6, 2, 2


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


A, B = random(SLOTS, RANK, LATENT), random(SLOTS, HEADS * (KEYS + VALUES), RANK)
BATCH = SimpleNamespace(
    num_segments=2,
    # As SGLang makes them: longer than there are segments.
    seg_indptr=torch.tensor([0, 2, 5, 99]),
    weight_indices=torch.tensor([1, 0, 99]),
    scalings=torch.tensor([0.5, 3.0], dtype=torch.float64),
)
OF_TOKENS = [1, 1, 0, 0, 0]


def updates() -> torch.Tensor:
    """The update s B A of each token's adapter [T, heads, K + V, L]."""
    of_slots = BATCH.scalings[:, None, None] * (B @ A)
    return of_slots.unflatten(1, (HEADS, KEYS + VALUES))[OF_TOKENS]


def test_queries_of_the_latent_have_the_adapter_of_keys() -> None:
    queries, before = random(TOKENS, HEADS, KEYS), random(TOKENS, HEADS, LATENT)
    low_rank = cpu.latent.keys_of_heads(queries, B, BATCH, KEYS + VALUES)
    found = cpu.latent.add_to_latent(low_rank, A, BATCH, before.clone())
    torch.testing.assert_close(found, before + torch.einsum("thk,thkl->thl", queries, updates()[:, :, :KEYS]))


def test_outputs_of_heads_have_the_adapter_of_values() -> None:
    attended, before = random(TOKENS, HEADS, LATENT), random(TOKENS, HEADS, VALUES)
    low_rank = cpu.latent.low_rank_of_latent(attended, A, BATCH)
    found = cpu.latent.add_values_of_heads(low_rank, B, BATCH, before.clone(), KEYS, VALUES)
    torch.testing.assert_close(found, before + torch.einsum("thl,thvl->thv", attended, updates()[:, :, KEYS:]))


@pytest.mark.parametrize("number_format", [FP8_BLOCK, INT8_CHANNEL], ids=lambda each: each.name)
def test_keys_and_values_of_heads_are_those_that_codes_stand_for(number_format: NumberFormat) -> None:
    codes, scales = number_format.quantise(random(HEADS * (KEYS + VALUES), LATENT).float())
    projection = SimpleNamespace(**{"weight": codes, number_format.scales_name("weight"): scales})
    norm = SimpleNamespace(weight=torch.ones(LATENT))
    heads = {"qk_nope_head_dim": KEYS, "v_head_dim": VALUES, "w_kc": None, "w_vc": None}
    attentions = [SimpleNamespace(kv_b_proj=projection, kv_a_layernorm=norm, **heads) for _ in range(2)]
    model = SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(self_attn=each) for each in attentions]))
    cpu.latent.decode_keys_and_values_of_heads(None, model, weight_names=["model.layers.1.self_attn.kv_b_proj.weight"])
    assert attentions[0].w_kc is None
    decoded = number_format.dequantise(codes, scales, torch.float32).unflatten(0, (HEADS, KEYS + VALUES))
    assert torch.equal(attentions[1].w_kc, decoded[:, :KEYS])
    assert torch.equal(attentions[1].w_vc.transpose(1, 2), decoded[:, KEYS:])
