"""Writes a HuggingFace folder: creates files at full size, which several processes then fill concurrently."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from converters.durable import DISK_FULL, rename, sync_all
from converters.errors import UserError
from converters.formats.safetensors.header import map_tensors, place_tensors, read_header
from converters.formats.safetensors.reader import CONFIG, INDEX, SINGLE_FILE, read_json
from converters.formats.safetensors.side_files import (
    copy_side_files,
    main_dtype,
    unquantised,
    with_dtype,
    write_config,
)
from converters.layout import Shape

_PARTIAL = ".partial"


def partial_folder(folder: Path) -> Path:
    """The folder in which the checkpoint `folder` is written until it is complete.

    Raises UserError if `folder` exists.
    """
    if folder.exists():
        raise UserError(f"{folder} exists; delete it or choose another folder")
    return folder.with_name(folder.name + _PARTIAL)


def create_checkpoint(
    folder_partial: Path,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    shard_size_bytes: int,
) -> None:
    """Create the safetensors files of a checkpoint at full size, with headers and all elements 0.

    Tensors keep their order; a file gets as many as fit into `shard_size_bytes`, and at least one. Remains of an
    interrupted run in `folder_partial` are deleted first. One process calls this, then all may `open_for_writing`.
    Raises UserError, leaving nothing behind, if the disk is full.
    """
    if not folder_partial.name.endswith(_PARTIAL):
        raise ValueError(f"{folder_partial} does not end in {_PARTIAL}")
    if folder_partial.exists():
        shutil.rmtree(folder_partial)
    folder_partial.mkdir(parents=True)
    files = cut_into_files(shapes, dtypes, shard_size_bytes)
    with _nothing_half_written(folder_partial):
        for file_name, names in files.items():
            _create_file(folder_partial / file_name, {name: shapes[name] for name in names}, dtypes)
        write_index(folder_partial, files, shapes, dtypes)


def write_index(
    folder: Path,
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Write the index of several files; a single one needs none."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(_nbytes(shapes, dtypes, name) for name in shapes)},
            "weight_map": {name: file_name for file_name, names in files.items() for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def open_for_writing(folder_partial: Path) -> Mapping[str, torch.Tensor]:
    """Name -> view of every tensor in the mapped files. Writes of any process to a view go to the file."""
    views: dict[str, torch.Tensor] = {}
    for path in sorted(folder_partial.glob("*.safetensors")):
        views.update(map_tensors(path, read_header(path), writable=True))
    return views


def finish(folder_partial: Path, folder: Path, *, copy_from: Path, config: Mapping[str, Any] | None = None) -> None:
    """Complete the checkpoint and rename it, after every process has written its part.

    config.json, unless it is given, tokenizer, chat template and generation config come from the model folder
    `copy_from`; the dtype in config.json becomes that of the weights, without any quantisation. Everything is on disk
    before `folder` appears. Raises UserError, leaving nothing behind, if `folder` exists or `copy_from` has no
    config.json.
    """
    with _nothing_half_written(folder_partial):
        partial_folder(folder)
        plain = unquantised(config or read_json(copy_from / CONFIG))
        write_config(folder_partial, with_dtype(plain, main_dtype(folder_partial)))
        copy_side_files(copy_from, folder_partial)
        sync_all(folder_partial)
    rename(folder_partial, folder)


@contextmanager
def _nothing_half_written(folder_partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder_partial)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise UserError(
                f"{folder_partial.parent} has no room for the checkpoint ({error.strerror});"
                " free some space or write it elsewhere"
            ) from error
        raise


def cut_into_files(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], shard_size_bytes: int
) -> dict[str, Sequence[str]]:
    """File name -> its tensors: as many as fit into `shard_size_bytes`, and at least one."""
    files: list[list[str]] = [[]]
    room = shard_size_bytes
    for name in shapes:
        nbytes = _nbytes(shapes, dtypes, name)
        if nbytes > room and files[-1]:
            files.append([])
            room = shard_size_bytes
        files[-1].append(name)
        room -= nbytes
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files, start=1)}


def _nbytes(shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], name: str) -> int:
    return torch.Size(shapes[name]).numel() * dtypes[name].itemsize


def _create_file(path: Path, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> None:
    start, entries = place_tensors(shapes, dtypes)
    size = max((entry.offset + entry.nbytes for entry in entries.values()), default=len(start))
    with path.open("wb") as file:
        file.write(start)
        file.flush()
        # Allocate space now: if the disk filled up later, writing to a mapped page would crash the process.
        os.posix_fallocate(file.fileno(), 0, size)
