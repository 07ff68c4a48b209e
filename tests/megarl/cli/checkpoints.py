"""Checkpoints for the commands, and the commands in a process of their own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from converters.architectures import read_architecture

QWEN3_MOE: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 50,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
HELD = """
import sys
from converters.stream.journal import Journal
from megarl.cli.main import main

write, left = Journal._write, iter(range(int(sys.argv.pop(1)) - 1))

def write_and_wait(journal, content):
    write(journal, content)
    if next(left, None) is None:
        sys.stdin.readline()

Journal._write = write_and_wait
sys.exit(main())
"""
"""A command that, when its journal has so many lines, waits for the end of its input: it is met in the middle."""


def write_model(folder: Path, **fields: Any) -> Path:
    """A model of random numbers."""
    config = {**QWEN3_MOE, **fields}
    architecture = read_architecture(config)
    generator = torch.Generator().manual_seed(3)
    dtypes = architecture.hf_dtypes(torch.bfloat16)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtypes[name]) for name, shape in architecture.hf_shapes.items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def start(*words: object, lines: int) -> subprocess.Popen[str]:
    """A command in a process of its own, which stands still when its journal has so many lines."""
    command = [sys.executable, "-c", HELD, str(lines), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def wait_for_lines(process: subprocess.Popen[str], file: Path, lines: int) -> None:
    """Return when a file has so many lines."""
    while not (file.exists() and file.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None, f"it ended before: {process.communicate()}"
        time.sleep(0.01)


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_bit(file: Path, offset: int) -> None:
    """Damage a file; a negative offset counts from its end."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 4
    file.write_bytes(content)
