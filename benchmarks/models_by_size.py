"""Models that benchmarks write: tiny ones, a real one, and larger ones with random weights for a GPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.quickstart.smollm2 import write_smollm2
from megarl.quickstart.tiny_models import write_tiny_model

_OF_A_GPU = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
LARGE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # 1.34 billion parameters.
    "dense_1b": ("qwen3", {**_OF_A_GPU, "num_hidden_layers": 24, "intermediate_size": 6144}),
    # 2.15 billion parameters, 0.50 of them active per token.
    "moe_2b": (
        "qwen3_moe",
        {
            **_OF_A_GPU,
            "num_hidden_layers": 16,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 576,
        },
    ),
}
"""Name -> the tiny model of the same architecture, and the sizes."""
TINY = ("qwen3", "qwen3_moe")
MODELS = (*TINY, "smollm2", *LARGE)


def write_model(name: str, folder: Path, **fields: Any) -> Path:
    """Write one of `MODELS` to `folder` in fp32; `fields` override its sizes, except for the real one."""
    if name == "smollm2":
        write_smollm2(folder, dtype=torch.float32)
        return folder
    alike, sizes = LARGE.get(name, (name, {}))
    return write_tiny_model(alike, folder, fields={**sizes, **fields})
