"""The cost of a sequence, beside the operations that transformers' models make."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.cost.compute import ForwardFlops, forward_flops
from converters.formats.safetensors import CONFIG, read_json
from megarl.quickstart.tiny_models import write_tiny_model

TOKENS = 96


# A vocabulary that counts, in an output layer of its own or in the embedding's.
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_operations_are_those_that_a_model_makes(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(name, tmp_path / name)
    # The counter knows neither of attention nor of experts in one operation.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
    model.resize_token_embeddings(2000)
    model.config.save_pretrained(folder)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(4, 4 + TOKENS)[None] % 60, use_cache=False)
    attention, rest = 0, 0
    for operation, count in counter.get_flop_counts()["Global"].items():
        if "bmm" in str(operation):
            attention += count // 2  # a mask hides half of the pairs
        else:
            rest += count
    counted = forward_flops(read_architecture(read_json(folder / CONFIG)))
    assert counted == pytest.approx(ForwardFlops(rest / TOKENS, attention / TOKENS**2), rel=0.03)


def test_operations_counted_by_hand(tmp_path: Path) -> None:
    """Two layers: attention of 4 heads and 2 groups of width 16, then 8 experts of which 2 take a token."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_hidden_layers": 2}
    folder = write_tiny_model("qwen3_moe", tmp_path, fields=sizes | experts | {"tie_word_embeddings": False})
    attention = 64 * (64 + 32 + 32) + 64 * 64
    router, of_experts = 64 * 8, 2 * 3 * 64 * 48
    config = read_json(folder / CONFIG)
    output = 64 * config["vocab_size"]
    assert forward_flops(read_architecture(config)) == (
        2 * (2 * (attention + router + of_experts) + output),
        2 * 4 * 32,
    )
