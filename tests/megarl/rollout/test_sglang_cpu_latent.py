"""Adapters of kv_b_proj in SGLang on a CPU: products in torch against B A itself."""

from types import SimpleNamespace

import torch

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
