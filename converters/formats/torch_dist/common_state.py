"""State that Megatron-LM's loader needs besides the chunks: format, arguments of the architecture, and FP8 state.

Megatron-LM compares the arguments in `common.pt` with its own, and takes some from there with `--use-checkpoint-args`.
"""

import argparse
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from converters.architectures import Architecture
from converters.formats.torch_dist.checkpoint import COMMON
from converters.layouts.torch_dist import cells, has_uniform_layers

FORMAT_FILE = "metadata.json"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
CHECKPOINT_VERSION = 3.0
_WITHOUT_EXTRA_STATE = ("embedding.", "output_layer.", "mlp.router.")
_MTP_ATTENTION = "mtp.layers.{layer}.transformer_layer.self_attention.core_attention"


def write_common_state(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Write `metadata.json`, and `common.pt` with these arguments of Megatron-LM."""
    (folder / FORMAT_FILE).write_text(json.dumps(_FORMAT))
    state = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False},
    }
    # Not by its name: a full disk would then be a RuntimeError, `unexpected pos 64 vs 0`.
    with (folder / COMMON).open("wb") as file:
        torch.save(state, file)


def extra_state_keys(architecture: Architecture) -> Iterator[str]:
    """Keys of the FP8 state that Transformer Engine's modules require, even if it is empty."""
    seen = set()
    for cell in cells(architecture, uniform=has_uniform_layers(architecture)):
        module = cell.key.rpartition(".")[0]
        if any(part in f"{module}." for part in _WITHOUT_EXTRA_STATE):
            continue
        place = ".".join(map(str, cell.index or (0,))) + "_" + ".".join(map(str, cell.leading or (1,)))
        key = f"{module}._extra_state/shard_{place}"
        if key not in seen:
            seen.add(key)
            yield key
    for layer in range(architecture.mtp_layers):
        yield f"{_MTP_ATTENTION.format(layer=layer)}._extra_state/shard_0_1"


def empty_extra_state() -> bytes:
    """The encoding of empty FP8 state; one copy serves all keys."""
    buffer = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], buffer)
    return buffer.getvalue()
