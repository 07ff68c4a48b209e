"""The cost of a sequence, beside the operations that transformers' models make."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from converters.architectures import read_architecture
from converters.cost.compute import attention_length
from converters.formats.safetensors import CONFIG, read_json
from megarl.quickstart.tiny_models import write_tiny_model

TOKENS = 96


# A vocabulary that counts, in an output layer of its own or in the embedding's.
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_attention_costs_as_much_as_all_else_at_its_length(name: str, tmp_path: Path) -> None:
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
    measured = (rest / TOKENS) / (attention / TOKENS**2)
    assert attention_length(read_architecture(read_json(folder / CONFIG))) == pytest.approx(measured, rel=0.03)
