"""Exports the weights of any torch_dist checkpoint to HuggingFace as a stream, whatever layout it was saved in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from converters.architectures import MTP_LAYERS, Architecture, read_architecture
from converters.boxes import Box, first_overlap
from converters.errors import UserError
from converters.formats.peft import refuse_adapter_checkpoint
from converters.formats.safetensors import (
    CONFIG,
    copy_side_files,
    cut_into_files,
    main_dtype,
    place_tensors,
    read_json,
    unquantised,
    with_dtype,
    write_config,
    write_index,
)
from converters.formats.torch_dist import METADATA, TorchDistCheckpoint
from converters.fp8 import quantisation_config, quantised_names, scales_of
from converters.hf_to_megatron import COPIES, HUGGINGFACE
from converters.layout import Shape
from converters.layouts.torch_dist import Piece, stored_pieces
from converters.manifest import MANIFEST, Manifest, manifest_of, require_files, write_manifest
from converters.number_formats import FP8_BLOCK
from converters.output_folder import OutputFolder, refuse_inside
from converters.stream.run import Progress, write_targets
from converters.stream.sources import TorchDistSource
from converters.stream.targets import Part, Place, Target, Written

_MTP = "mtp."


@dataclass(frozen=True)
class ExportPlan:
    """Every tensor and byte offset of a HuggingFace checkpoint to write."""

    files: Mapping[str, list[str]]
    headers: Mapping[str, bytes]
    targets: list[Target]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    nbytes: int
    """Total size of the files."""
    left_out_mtp_layers: int = 0
    """Number of multi-token-prediction layers that config.json has, but that are missing or not wanted."""


def export_checkpoint(
    megatron_folder: Path,
    folder: Path,
    *,
    hf_config_folder: Path | None,
    fp8: bool,
    shard_size_bytes: int,
    workers: int,
    progress: Progress,
    without_mtp: bool = False,
) -> ExportPlan:
    """Write the weights of a torch_dist checkpoint to `folder` as safetensors files, with config and tokenizer.

    Config and tokenizer come from `hf_config_folder`, or from the checkpoint if it was converted from HuggingFace. With
    `fp8`, the layers' matrices are written in block FP8. If the checkpoint has no multi-token prediction, or with
    `without_mtp`, neither has the written model. After an interruption, the same call resumes.

    Raises UserError for anything wrong with the checkpoint or the output folder, either before writing or after
    deleting the output.
    """
    exported = _source_of(megatron_folder, hf_config_folder, without_mtp=without_mtp)
    plan = plan_export(
        exported.architecture,
        exported.pieces,
        exported.source,
        copies=exported.copies,
        fp8=fp8,
        shard_size_bytes=shard_size_bytes,
    )
    purpose = {
        "from": _fingerprint(exported.checkpoint),
        "config": exported.config,
        "fp8": fp8,
        "shard_size_bytes": shard_size_bytes,
    }
    refuse_inside(folder, megatron_folder)
    with OutputFolder(folder, purpose, nbytes=plan.nbytes) as output:
        for file, header in plan.headers.items():
            _write_header(output.partial / file, header)
        written = write_targets(
            plan.targets, exported.source, output.partial, output.journal, workers=workers, progress=progress
        )
        _finish(output, exported, plan, written, fp8=fp8)
    return replace(plan, left_out_mtp_layers=exported.left_out_mtp_layers)


@dataclass(frozen=True)
class _Exported:
    """The checkpoint to export, and the model to write."""

    checkpoint: TorchDistCheckpoint
    side_files: Path
    config: Mapping[str, Any]
    architecture: Architecture
    pieces: Sequence[Piece]
    source: TorchDistSource
    copies: tuple[str, ...]
    left_out_mtp_layers: int


def _source_of(megatron_folder: Path, hf_config_folder: Path | None, *, without_mtp: bool) -> _Exported:
    found = manifest_of(megatron_folder)
    if found:
        require_files(*found, but_below=HUGGINGFACE if hf_config_folder else None, frames=True)
    checkpoint = TorchDistCheckpoint(megatron_folder)
    refuse_adapter_checkpoint(checkpoint.folder)
    side_files = hf_config_folder or _own_side_files(checkpoint)
    config = read_json(side_files / CONFIG)
    whole = architecture = read_architecture(config)
    has_mtp = any(key.startswith(_MTP) for key in checkpoint.weights)
    left_out = 0 if has_mtp and not without_mtp else architecture.mtp_layers
    weights = checkpoint.weights
    if left_out:
        config = {**config, MTP_LAYERS: 0}
        architecture = read_architecture(config)
        weights = {key: each for key, each in weights.items() if not key.startswith(_MTP)}
    copies = _copies(found, whole if has_mtp else architecture)
    shapes = {key: each.shape for key, each in weights.items()}
    boxes = {key: [chunk.box for chunk in each.chunks] for key, each in weights.items()}
    pieces = list(stored_pieces(architecture, shapes, boxes))
    return _Exported(
        checkpoint,
        side_files,
        config,
        architecture,
        pieces,
        TorchDistSource(checkpoint, pieces),
        tuple(copy for copy in copies if copy in architecture.hf_copies),
        left_out,
    )


def _finish(
    output: OutputFolder,
    exported: _Exported,
    plan: ExportPlan,
    written: Mapping[str, Sequence[Written]],
    *,
    fp8: bool,
) -> None:
    """Write everything but the tensors, and complete the folder."""
    write_index(output.partial, plan.files, plan.shapes, plan.dtypes)
    plain = unquantised(exported.config)
    if fp8:
        # The dtype in config.json is that of the unquantised weights.
        write_config(output.partial, {**plain, "quantization_config": quantisation_config(exported.architecture)})
    else:
        write_config(output.partial, with_dtype(plain, main_dtype(output.partial)))
    copy_side_files(exported.side_files, output.partial)
    write_manifest(output.partial, written, {})
    output.complete()


def plan_export(
    architecture: Architecture,
    pieces: Sequence[Piece],
    source: TorchDistSource,
    *,
    copies: tuple[str, ...],
    fp8: bool,
    shard_size_bytes: int,
) -> ExportPlan:
    """Lay out the files. Raises UserError if the chunks lack an element of a tensor or hold one twice."""
    parts = _parts(architecture, pieces)
    for copy in copies:
        parts[copy] = parts[architecture.hf_copies[copy]]
    shapes = {name: architecture.hf_shapes[architecture.hf_copies.get(name, name)] for name in parts}
    dtypes = {name: _dtype(source, parts[name]) for name in parts}
    if fp8:
        shapes, dtypes = FP8_BLOCK.with_scales(shapes, dtypes, quantised_names(architecture))
    scales = scales_of(Path(), shapes, dtypes)
    files = cut_into_files(shapes, dtypes, shard_size_bytes)
    headers: dict[str, bytes] = {}
    places: dict[str, Place] = {}
    nbytes = 0
    for file, names in files.items():
        headers[file], entries = place_tensors({name: shapes[name] for name in names}, dtypes)
        places |= {name: Place(file, entry.offset) for name, entry in entries.items()}
        nbytes += len(headers[file]) + sum(entry.nbytes for entry in entries.values())
    targets = [
        Target(name, places[name], dtypes[name], shapes[name], each, scales=places.get(scales.get(name, "")))
        for name, each in parts.items()
    ]
    # Each file is written from beginning to end.
    targets.sort(key=lambda target: (target.place.file, target.place.offset))
    return ExportPlan({file: list(names) for file, names in files.items()}, headers, targets, shapes, dtypes, nbytes)


def _parts(architecture: Architecture, pieces: Sequence[Piece]) -> dict[str, list[Part]]:
    """HuggingFace name -> the parts of that tensor, in model order."""
    parts: dict[str, list[Part]] = {name: [] for name in architecture.hf_shapes}
    for piece in pieces:
        for each in piece.placements:
            parts[each.hf_name].append(Part(piece.name, each.local_box, each.hf_box))
    for name, shape in architecture.hf_shapes.items():
        boxes = [part.box for part in parts[name]]
        if overlap := first_overlap(boxes):
            raise UserError(f"the checkpoint holds {overlap[1]} of {name} in two chunks; {METADATA} is damaged")
        if sum(box.size for box in boxes) != Box.whole(shape).size:
            raise UserError(f"the checkpoint lacks chunks with parts of {name}; it is incomplete, save it again")
    return parts


def _dtype(source: TorchDistSource, parts: list[Part]) -> torch.dtype:
    return source.dtype(parts[0].source)


def _copies(found: tuple[Path, Manifest] | None, architecture: Architecture) -> tuple[str, ...]:
    """Copies of tied weights to write: those of the model that was converted if known, else of released models."""
    if found is None or COPIES not in found[1].source:
        return architecture.exported_copies
    copies, possible = found[1].source[COPIES], list(architecture.hf_copies)
    if unknown := [name for name in copies if name not in possible] if isinstance(copies, list) else [copies]:
        raise UserError(
            f"{found[0] / MANIFEST} names copies of weights, {unknown[0]} for one, that the model of config.json does"
            " not have; copy the checkpoint again"
        )
    return tuple(name for name in possible if name in copies)


def _own_side_files(checkpoint: TorchDistCheckpoint) -> Path:
    own = checkpoint.folder.parent / HUGGINGFACE
    if not (own / CONFIG).is_file():
        raise UserError(
            f"{checkpoint.folder.parent} has no {HUGGINGFACE}/{CONFIG}; name a folder with the model's {CONFIG} and"
            " tokenizer with --hf-config"
        )
    return own


def _fingerprint(checkpoint: TorchDistCheckpoint) -> list[Any]:
    """Name, size and modification time of every file, which nearly always change with the contents."""
    stats = [(path.name, path.stat()) for path in sorted(checkpoint.folder.iterdir())]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _write_header(path: Path, header: bytes) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(header)
