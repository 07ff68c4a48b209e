"""Adapters in the format of HuggingFace's PEFT: a folder with adapter_config.json and adapter_model.safetensors."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from converters.architectures import ALL_LINEAR, Architecture, Lora, adapter_architecture
from converters.architectures.lora import target_names
from converters.boxes import Box
from converters.durable import rename, sync_all
from converters.errors import UserError
from converters.formats.safetensors import create_checkpoint, read_json
from converters.formats.safetensors.header import map_tensors, read_header
from converters.formats.safetensors.reader import SINGLE_FILE
from converters.layout import Shape

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PLAIN_INITIALISATIONS = ("gaussian", "orthogonal", "eva")
"""Values of init_lora_weights, besides true and false, that initialise A and B without changing the model's weights."""
_METADATA = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("r", "lora_alpha", "lora_dropout", "target_modules", "runtime_config", "megatron_config", "megatron_core"),
        # Details of an initialisation, which only take effect with another field.
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "layers_pattern"),
    )
)
"""Fields of adapter_config.json that may have any value in plain LoRA. Others must be empty, but for `_PLAIN` and
init_lora_weights."""
_MERGE = "merge it into its model with PEFT and train on from that"
_PLAIN: Mapping[str, Any] = {"peft_type": "LORA", "bias": "none"}
"""Fields that are never empty, with their values in plain LoRA."""


class AdapterFolder:
    """A PEFT adapter on disk. Opening it reads the configuration and the header.

    Raises UserError if a file is missing or broken, and for an adapter other than plain LoRA.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lora = read_adapter_config(folder)
        path = folder / _WEIGHTS
        self._entries = read_header(path)
        self._views = map_tensors(path, self._entries, writable=False)

    def check(self, architecture: Architecture, lora: Lora | None = None) -> None:
        """Raise UserError unless this is an adapter of `architecture` and, if given, of `lora`."""
        lora = lora or self.lora
        if (self.lora.rank, self.lora.alpha) != (lora.rank, lora.alpha):
            raise UserError(
                f"{self.folder} has rank {self.lora.rank} and alpha {self.lora.alpha:g}, and lora.rank={lora.rank} and"
                f" lora.alpha={lora.alpha:g} are asked for: leave both out"
            )
        expected = adapter_architecture(architecture, lora).hf_shapes
        held = {name: entry.shape for name, entry in self._entries.items()}
        another = f"{self.folder} is no adapter of these matrices of this {architecture.model_type} model: it"
        if missing := sorted(expected.keys() - held.keys()):
            raise UserError(f"{another} lacks {missing[0]}, one of {len(missing)}; give the adapter of this model")
        if surplus := sorted(held.keys() - expected.keys()):
            raise UserError(
                f"{another} holds {surplus[0]}, one of {len(surplus)} beyond them; give the adapter of this model"
            )
        for name, shape in expected.items():
            if held[name] != shape:
                raise UserError(
                    f"{another} holds {name} with shape {list(held[name])}, where the model has {list(shape)}; give the"
                    " adapter of this model"
                )

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A view of `box` of a tensor in the memory-mapped file."""
        return self._views[name][box.slices()]


def read_adapter_config(folder: Path) -> Lora:
    """Read the adapter_config.json in `folder`. Raises UserError as `AdapterFolder`."""
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        raise UserError(f"{path} is missing; give the folder of a PEFT adapter, with {ADAPTER_CONFIG} and {_WEIGHTS}")
    config = read_json(path)
    _check_plain(path, config)
    targets, rank, alpha = (config.get(name) for name in ("target_modules", "r", "lora_alpha"))
    if targets != ALL_LINEAR and not (isinstance(targets, list) and all(isinstance(each, str) for each in targets)):
        raise UserError(f"{path} has target_modules={targets!r}, which is no list of names: write them out")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise UserError(f"{path} has r={rank!r} and lora_alpha={alpha!r}, where numbers belong; correct them")
    return Lora(rank, float(alpha), (targets,) if isinstance(targets, str) else tuple(sorted(targets)))


def read_dropout(folder: Path) -> float:
    """The lora_dropout in the adapter_config.json in `folder`."""
    dropout = read_json(folder / ADAPTER_CONFIG).get("lora_dropout")
    return float(dropout) if isinstance(dropout, int | float) else 0.0


def _check_plain(path: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError unless the fields are those of plain LoRA; fields that PEFT adds later are refused, too."""
    for name, value in config.items():
        if name == "init_lora_weights":
            _check_initialisation(path, value)
        elif name in _PLAIN:
            if value != _PLAIN[name]:
                raise UserError(f"{path} has {name}={value!r}, and only {_PLAIN[name]!r} is supported: {_MERGE}")
        elif value and name not in _METADATA:
            raise UserError(f"{path} has {name}={value!r}, which plain LoRA has not: {_MERGE}")


def _check_initialisation(path: Path, method: Any) -> None:
    """Raise UserError for an adapter that PEFT initialised from the model's weights, which may have changed these."""
    if isinstance(method, str) and method.lower() not in _PLAIN_INITIALISATIONS:
        raise UserError(
            f"{path} has init_lora_weights={method!r}, and such an adapter may belong to weights other than the"
            " model's: save it as plain LoRA with PEFT's"
            " save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def write_adapter_config(folder: Path, adapter: Architecture, lora: Lora) -> None:
    """Write the adapter_config.json of an adapter to `folder`."""
    (folder / ADAPTER_CONFIG).write_text(json.dumps(_content(adapter, lora), indent=2) + "\n")


def _content(adapter: Architecture, lora: Lora) -> dict[str, Any]:
    """The content of adapter_config.json, as PEFT writes it."""
    explicit = lora.target_modules if ALL_LINEAR not in lora.target_modules else target_names(adapter)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(explicit),
    }


def refuse_adapter_checkpoint(folder: Path) -> None:
    """Raise UserError for a training checkpoint that contains an adapter but no model."""
    if (folder / ADAPTER_CONFIG).exists():
        raise UserError(
            f"{folder} holds an adapter alone, whose model is elsewhere; the run that wrote it exports both at its end,"
            " merged as huggingface and for PEFT as adapter, so let it end at this step, or take these two"
        )


def create_adapter(partial: Path, shapes: Mapping[str, Shape], dtype: torch.dtype) -> None:
    """Create an adapter's file at full size, filled with zeros. See `create_checkpoint`."""
    # PEFT reads one file.
    create_checkpoint(partial, shapes, dict.fromkeys(shapes, dtype), shard_size_bytes=sys.maxsize)


def finish_adapter(partial: Path, folder: Path, adapter: Architecture, lora: Lora) -> None:
    """Complete the adapter that was created in `partial` and give it its name, when every process has written."""
    (partial / SINGLE_FILE).rename(partial / _WEIGHTS)
    write_adapter_config(partial, adapter, lora)
    sync_all(partial)
    rename(partial, folder)
