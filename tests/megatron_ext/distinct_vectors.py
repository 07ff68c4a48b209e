"""Checkpoints in which no two vectors are the same: new models have norms of ones and biases of zeros."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_distinct_vectors(source: Path, target: Path) -> Path:
    """Copy the HuggingFace checkpoint `source` to `target`, with noise on every norm and bias; returns `target`.

    A norm or bias in the wrong place then changes the result.
    """
    shutil.copytree(source, target, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(11)
    for path in sorted(target.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.dim() == 1:
                tensors[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, path, metadata={"format": "pt"})
    return target
