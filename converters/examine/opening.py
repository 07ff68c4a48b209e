"""Opens a checkpoint of either kind, and finds its config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.errors import UserError
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.formats.safetensors.reader import INDEX, SINGLE_FILE
from converters.formats.torch_dist import LATEST, METADATA, TorchDistCheckpoint
from converters.hf_to_megatron import HUGGINGFACE

Checkpoint = HuggingFaceCheckpoint | TorchDistCheckpoint


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the checkpoint in `folder`. Raises UserError if there is none, or it is damaged or incomplete."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one with a checkpoint")
    if any((folder / name).is_file() for name in (METADATA, LATEST)):
        return TorchDistCheckpoint(folder)
    if any((folder / name).is_file() for name in (CONFIG, SINGLE_FILE, INDEX)):
        return HuggingFaceCheckpoint(folder)
    raise UserError(
        f"{folder} holds no checkpoint: neither {CONFIG} and safetensors files, nor {METADATA} or {LATEST}"
        " of a torch_dist checkpoint"
    )


def root_of(checkpoint: Checkpoint) -> Path:
    """The folder with the manifest, if there is one."""
    return checkpoint.folder if isinstance(checkpoint, HuggingFaceCheckpoint) else checkpoint.folder.parent


def config_of(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The config.json next to a checkpoint; None if there is none."""
    root = root_of(checkpoint)
    path = (root if isinstance(checkpoint, HuggingFaceCheckpoint) else root / HUGGINGFACE) / CONFIG
    return read_json(path) if path.is_file() else None
