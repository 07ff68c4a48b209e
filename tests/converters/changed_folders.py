"""Changes of a checkpoint's folder by which it becomes a wrong one, and names in the folders that tests change."""

from collections.abc import Callable
from pathlib import Path

INDEX = "model.safetensors.index.json"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
Change = Callable[[Path], None]


def write(file: str, content: str) -> Change:
    return lambda folder: (folder / file).write_text(content) and None
