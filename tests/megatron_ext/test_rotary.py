"""Rotary frequencies: those of whole-size models, and the tables that are kept of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from converters.architectures import read_architecture
from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.rotary import rotary_embedding
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ParallelSizes
from megatron_ext import compat
from megatron_ext.attention.rotary import table_rows
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import RaggedBatch


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64), (32.0, 128)])
def test_llama3_frequencies_equal_those_of_transformers(factor: float, head_dim: int) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.for_model("llama", head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    expected, scaling = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    fields = rotary_embedding(HuggingFaceConfig({"model_type": "llama", "rope_parameters": rope}))
    del fields["position_embedding_type"]
    got = RotaryEmbedding(kv_channels=head_dim, use_cpu_initialization=True, **fields).inv_freq
    assert scaling == 1.0
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    plain = RotaryEmbedding(head_dim, 1.0, rotary_base=500000, use_cpu_initialization=True).inv_freq
    # Some frequencies stay, some are smoothed, some are divided by the factor.
    ratio = plain / got
    assert {1.0, factor} < set(ratio.round(decimals=3).tolist())


def test_tables_have_few_lengths_and_fewer_rows_than_all_tokens() -> None:
    assert [table_rows(longest, tokens=2000) for longest in (1, 2, 3, 4, 5, 700)] == [1, 2, 4, 4, 8, 1024]
    assert [table_rows(longest, tokens=1000) for longest in (513, 700, 800, 999, 1000)] == [768, 768, 896, 999, 1024]
    for tokens in range(2, 70):
        assert all(longest <= table_rows(longest, tokens) < tokens for longest in range(1, tokens))


# Two sequences are as many tokens as the longer one, rounded up, would have rows: 8.
LENGTHS = [5, 3, 7, 6]


def packed_and_alone(rank: int, sizes: ParallelSizes, folder: Path) -> tuple[Tensor, Tensor, list[int]]:
    """Log-probs of sequences, two of them packed, and each alone; how many tables were kept, and are once they left."""
    checkpoint = HuggingFaceCheckpoint(folder)
    model = MegatronModel(read_architecture(checkpoint.config), MegatronOptions(sizes, torch.float32), rank)
    model.load_huggingface(checkpoint)
    tokens = torch.randint(4, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    batch = RaggedBatch(tokens, torch.tensor(LENGTHS))
    # Ranks begin as copies of the tests' process, with what an earlier test left in it.
    compat.drop_rotary_tables()
    kept = []
    caches = [kind.forward.cache_info for kind in (RotaryEmbedding, YarnRotaryEmbedding)]
    found = []
    for micro_batches in ([[0, 1], [2], [3]], [[0], [1], [2], [3]]):
        log_probs = model.log_probs(batch, micro_batches, temperature=1.0)
        assert log_probs is not None
        found.append(log_probs.log_probs)
        kept.append(sum(cache().currsize for cache in caches))
    model.offload(["weights"])
    return *found, [*kept, sum(cache().currsize for cache in caches)]


def test_positions_are_looked_up_in_tables_that_several_lengths_share(tiny_models: Mapping[str, Path]) -> None:
    packed, alone, kept = run_ranks(packed_and_alone, ParallelSizes(), tiny_models["qwen3"])[0]
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    # 6 rows and 8; alone, 4, too.
    assert kept == [2, 3, 0]


def test_latent_attention_looks_positions_up_in_them_too(tiny_models: Mapping[str, Path]) -> None:
    packed, alone, (*_, left) = run_ranks(packed_and_alone, ParallelSizes(), tiny_models["deepseek_v3"])[0]
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    assert left == 0


def rows_and_tokens(rank: int, sizes: ParallelSizes, folder: Path) -> set[tuple[int, int]]:
    """How many rows the tables have that several sequences, packed, are rotated by, and how many tokens these are."""
    found = set()
    original = rope_utils._apply_rotary_pos_emb_thd

    def recorded(heads: Tensor, bounds: Tensor, table: Tensor, **options: Any) -> Tensor:
        if len(bounds) > 2:
            found.add((len(table), int(bounds[-1])))
        rotated: Tensor = original(heads, bounds, table, **options)
        return rotated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", recorded)
        packed_and_alone(rank, sizes, folder)
    return found


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_packed_sequences_are_rotated_from_their_own_beginnings(model: str, tiny_models: Mapping[str, Path]) -> None:
    """A table of as many rows as tokens is read row by row, past the bounds of sequences."""
    assert run_ranks(rows_and_tokens, ParallelSizes(), tiny_models[model])[0] == {(6, 8)}
