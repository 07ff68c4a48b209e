"""Distributed checkpoints by other means than the converters': whole tensors by plain torch, files by torch.save."""

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from conversions import MODELS, architecture_of
from small_configs import count_up
from test_megatron_layout import Rank, expected_tensors
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from converters.boxes import Box
from converters.layouts.megatron import ParallelSizes

Stored = dict[str, list[tuple[Box, bytes]]]
"""Key -> chunks, each with its blob."""
_FUSED = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
"""Norm -> the module after it, which Transformer Engine joins to it where the layer has such a module."""


def huggingface_tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Float32 tensors of which each element has a value of its own, not 0."""
    return count_up(architecture_of(config).hf_shapes)


def whole_tensors(config: Mapping[str, Any], hf: Mapping[str, Tensor], *, stacked: bool) -> dict[str, Tensor]:
    """The tensors of a distributed checkpoint of a model of 4 layers, by key, with Transformer Engine's names.

    `stacked` puts the layers of the decoder on top of each other.
    """
    local = expected_tensors(
        hf, config, ParallelSizes(), Rank(experts=tuple(range(architecture_of(config).num_experts)))
    )
    tensors: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in local.items():
        before, is_expert, after = name.partition("mlp.experts.local_experts.")
        if is_expert:
            experts.setdefault(f"{before}mlp.experts.experts.{after.partition('.')[2]}", []).append(tensor)
        else:
            tensors[_transformer_engine_name(name, local)] = tensor
    tensors |= {name: torch.stack(each) for name, each in experts.items()}
    if not stacked:
        return tensors
    result = {name: each for name, each in tensors.items() if not name.startswith("decoder.layers.")}
    names = [name.removeprefix("decoder.layers.0.") for name in tensors if name.startswith("decoder.layers.0.")]
    return result | {
        f"decoder.layers.{name}": torch.stack([tensors[f"decoder.layers.{i}.{name}"] for i in range(4)])
        for name in names
    }


def _transformer_engine_name(name: str, local: Mapping[str, Tensor]) -> str:
    for norm, module in _FUSED.items():
        layer, found, _ = name.partition(f"{norm}.weight")
        if found and f"{layer}{module}.weight" in local:
            return f"{layer}{module}.layer_norm_weight"
    return name


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def cut(tensors: Mapping[str, Tensor], boxes: Mapping[str, Sequence[Box]]) -> Stored:
    """The tensors in chunks."""
    return {key: [(box, saved(tensor[box.slices()].clone())) for box in boxes[key]] for key, tensor in tensors.items()}


def whole(tensors: Mapping[str, Tensor]) -> dict[str, list[Box]]:
    return {key: [Box.whole(tensor.shape)] for key, tensor in tensors.items()}


def write_distributed(
    folder: Path,
    tensors: Mapping[str, Tensor],
    stored: Stored,
    *,
    files: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint of `stored` chunks in `files` files, the chunks taking turns; with `config` as a converted one."""
    target = folder / "release" if config else folder
    target.mkdir(parents=True)
    contents = [b""] * files
    entries: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    number = 0
    for key, chunks in stored.items():
        listed = []
        for box, blob in chunks:
            number = (number + 1) % files
            places[dcp.MetadataIndex(key, torch.Size(box.start))] = _StorageInfo(
                f"__{number}_0.distcp", len(contents[number]), len(blob)
            )
            contents[number] += blob
            listed.append(dcp.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)))
        properties = dcp.TensorProperties(dtype=tensors[key].dtype)
        entries[key] = dcp.TensorStorageMetadata(properties, tensors[key].shape, listed)
    for number, content in enumerate(contents):
        (target / f"__{number}_0.distcp").write_bytes(content)
    write_table(target, dcp.Metadata(entries, planner_data={}, storage_data=places))
    torch.save({"iteration": 7}, target / "common.pt")
    if config:
        (folder / "latest_checkpointed_iteration.txt").write_text("release")
        (folder / "huggingface").mkdir()
        (folder / "huggingface/config.json").write_text(json.dumps(config))
    return folder


def read_table(folder: Path) -> dcp.Metadata:
    """The table of contents of a checkpoint that the test wrote itself."""
    return pickle.loads((folder / ".metadata").read_bytes())


def write_table(folder: Path, table: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def tiny(folder: Path, name: str = "qwen3_moe") -> Path:
    """A whole checkpoint of a tiny model, one chunk for each tensor."""
    config = MODELS[name]
    stacked = name != "deepseek_v3"
    tensors = whole_tensors(config, huggingface_tensors(config), stacked=stacked)
    return write_distributed(folder, tensors, cut(tensors, whole(tensors)), files=2, config=config)
