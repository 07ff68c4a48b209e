"""Writing a HuggingFace folder: files of full size first, which several processes then fill at once."""

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from converters.errors import UserError
from converters.formats.safetensors.header import make_header, map_tensors, read_header
from converters.formats.safetensors.reader import CONFIG, INDEX, SINGLE_FILE, read_json
from converters.layout import Shape

_PARTIAL = ".partial"
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "*.py",
)
"""What belongs to a model beside config.json and the weights."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def partial_folder(folder: Path) -> Path:
    """Where the checkpoint `folder` is written until it is complete. Raises UserError where `folder` exists."""
    if folder.exists():
        raise UserError(f"{folder} exists; delete it or choose another folder")
    return folder.with_name(folder.name + _PARTIAL)


def create_checkpoint(
    folder_partial: Path,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    shard_size_bytes: int,
) -> None:
    """Make the safetensors files of a checkpoint at full size, with their headers and all elements 0.

    Tensors keep their order; a file gets as many as fit into `shard_size_bytes`, and at least one.
    What an interrupted run left in `folder_partial` is deleted first. One process calls this, then all may
    `open_for_writing`. Raises UserError, leaving nothing behind, where the disk is full.
    """
    if not folder_partial.name.endswith(_PARTIAL):
        raise ValueError(f"{folder_partial} does not end in {_PARTIAL}")
    if folder_partial.exists():
        shutil.rmtree(folder_partial)
    folder_partial.mkdir(parents=True)
    files = _cut_into_files(shapes, dtypes, shard_size_bytes)
    with _nothing_half_written(folder_partial):
        for file_name, names in files.items():
            _create_file(folder_partial / file_name, {name: shapes[name] for name in names}, dtypes)
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(_nbytes(shapes, dtypes, name) for name in shapes)},
                "weight_map": {name: file_name for file_name, names in files.items() for name in names},
            }
            (folder_partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def open_for_writing(folder_partial: Path) -> Mapping[str, torch.Tensor]:
    """Name -> view of every tensor in the mapped files. What any process writes to a view goes to the file."""
    views: dict[str, torch.Tensor] = {}
    for path in sorted(folder_partial.glob("*.safetensors")):
        views.update(map_tensors(path, read_header(path), writable=True))
    return views


def finish(folder_partial: Path, folder: Path, *, copy_from: Path) -> None:
    """Complete the checkpoint and give it its name, when every process has written its part.

    config.json, tokenizer, chat template and generation config come from the model folder `copy_from`;
    the type that config.json names becomes that of the weights. Everything is on disk before `folder`
    appears. Raises UserError, leaving nothing behind, where `folder` exists or `copy_from` has no config.json.
    """
    with _nothing_half_written(folder_partial):
        partial_folder(folder)
        config = _with_dtype(read_json(copy_from / CONFIG), folder_partial)
        (folder_partial / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        for pattern in _COPIED:
            for path in copy_from.glob(pattern):
                shutil.copyfile(path, folder_partial / path.name)
        for path in [*folder_partial.iterdir(), folder_partial]:
            _fsync(path)
    folder_partial.rename(folder)
    _fsync(folder.parent)


@contextmanager
def _nothing_half_written(folder_partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        shutil.rmtree(folder_partial)
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise UserError(
                f"{folder_partial.parent} has no room for the checkpoint ({error.strerror});"
                " free some space or write it elsewhere"
            ) from error
        raise


def _cut_into_files(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], shard_size_bytes: int
) -> dict[str, Sequence[str]]:
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
    start, size = make_header(shapes, dtypes)
    with path.open("wb") as file:
        file.write(start)
        file.flush()
        # Space is taken now: a disk that fills up later would end a process that writes to a mapped page.
        os.posix_fallocate(file.fileno(), 0, size)


def _with_dtype(config: dict[str, Any], folder_partial: Path) -> dict[str, Any]:
    elements: Counter[torch.dtype] = Counter()
    for path in folder_partial.glob("*.safetensors"):
        for entry in read_header(path).values():
            elements[entry.dtype] += entry.nbytes
    (dtype, _), *_ = elements.most_common(1)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
