"""Rotary frequencies of whole-size models, which tiny ones with their short sequences tell little about."""

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from converters.architectures.hf_config import HuggingFaceConfig
from converters.architectures.rotary import rotary_embedding


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
