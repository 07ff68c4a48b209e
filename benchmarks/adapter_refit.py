"""Bytes of a LoRA run's refit: merged weights versus the adapter alone, in the buckets of the engines' loader."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from machine import describe, give_out

from converters.architectures import Architecture, Lora, adapter_architecture, read_architecture
from converters.formats.safetensors import read_json
from megarl.config.folder import recipes_folder
from megarl.resharding.loader.buckets import cut_into_buckets

_MODELS = ("qwen3_1_7b", "qwen2_5_7b", "qwen3_8b", "qwen2_5_32b", "llama3_1_70b")
_RANKS = (8, 32, 64)
_DTYPE = torch.bfloat16
_BUCKET_BYTES = 4 * 2**30


def moved_bytes(architecture: Architecture) -> int:
    """Bytes moved by a refit of all tensors."""
    shapes = architecture.hf_shapes
    return sum(each.size_bytes for each in cut_into_buckets(shapes, dict.fromkeys(shapes, _DTYPE), _BUCKET_BYTES))


def rows() -> Iterator[str]:
    """Yield one table row per model."""
    for model in _MODELS:
        architecture = read_architecture(read_json(recipes_folder() / "models" / f"{model}.json"))
        whole = moved_bytes(architecture)
        alone = [moved_bytes(adapter_architecture(architecture, Lora(rank, 32.0))) for rank in _RANKS]
        cells = [f"{size / 1e6:,.0f} ({size / whole:.2%})" for size in alone]
        yield f"| {model} | {whole / 1e6:,.0f} | {' | '.join(cells)} |"


def main() -> None:
    """Count the bytes, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="file to write the page to")
    options = parser.parse_args()
    ranks = " | ".join(f"alone, rank {rank}" for rank in _RANKS)
    lines = [
        "# Refits of an adapter alone",
        "",
        f"{date.today()}, {describe(Path.cwd())}.",
        "",
        f"    {shlex.join([Path(sys.executable).name, *sys.argv])}",
        "",
        "MB in bf16, counted from config.json; every linear layer is adapted.",
        "",
        f"| model | merged | {ranks} |",
        f"|---|---{'|---' * len(_RANKS)}|",
        *rows(),
        "",
    ]
    give_out("\n".join(lines), options.markdown)


if __name__ == "__main__":
    main()
