"""Reads a HuggingFace folder: config.json and one or several safetensors files."""

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from converters.boxes import Box
from converters.errors import UserError
from converters.formats.safetensors.header import TensorEntry, map_tensors, read_header
from converters.layout import Shape

CONFIG = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HuggingFaceCheckpoint:
    """The tensors of a HuggingFace folder. Opening it reads the headers only.

    Raises UserError if config.json, the index or a safetensors file is missing, broken or truncated, if the index and
    the files disagree, or if a tensor is in two files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._files = {path: read_header(path) for path in _weight_files(self.folder)}
        self._file_of: dict[str, Path] = {}
        for path, entries in self._files.items():
            for name in entries:
                if name in self._file_of:
                    raise UserError(f"{name} is in both {self._file_of[name]} and {path}; delete one of them")
                self._file_of[name] = path
        _check_index(self.folder, self._file_of)
        self._views: dict[Path, dict[str, torch.Tensor]] = {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_json(self.folder / CONFIG)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name -> shape of every tensor."""
        return {name: self._entry(name).shape for name in self._file_of}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Name -> type of every tensor."""
        return {name: self._entry(name).dtype for name in self._file_of}

    @property
    def files(self) -> list[Path]:
        """The safetensors files."""
        return list(self._files)

    def fingerprint(self) -> list[tuple[str, int, int]]:
        """Name, size and modification time of every file that is read; changed contents nearly always change it."""
        stats = [(path.name, path.stat()) for path in (self.folder / CONFIG, *self._files)]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A view of `box` of a tensor in the memory-mapped file: only what is then touched is read from disk."""
        path = self._file_of[name]
        if path not in self._views:
            self._views[path] = map_tensors(path, self._files[path], writable=False)
        return self._views[path][name][box.slices()]

    def check(self, expected_shapes: Mapping[str, Shape]) -> None:
        """Raise UserError, naming the tensor, unless the tensors are just these with just these shapes."""
        held = self.shapes
        if missing := [name for name in expected_shapes if name not in held]:
            raise UserError(f"{self.folder} lacks the tensor {missing[0]}{_and_more(missing)}, which its model has")
        if surplus := sorted(held.keys() - expected_shapes.keys()):
            raise UserError(
                f"{self._file_of[surplus[0]]} holds the tensor {surplus[0]}{_and_more(surplus)}, which a model of"
                f" this {CONFIG} does not have; the two do not belong together"
            )
        for name, shape in expected_shapes.items():
            if held[name] != tuple(shape):
                raise UserError(
                    f"{self._file_of[name]} holds {name} with shape {list(held[name])}, where {CONFIG} gives"
                    f" {list(shape)}; the two do not belong together"
                )

    def _entry(self, name: str) -> TensorEntry:
        return self._files[self._file_of[name]][name]


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _weight_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the path of a model in HuggingFace form")
    single, index = folder / SINGLE_FILE, folder / INDEX
    if single.exists() and index.exists():
        raise UserError(f"{folder} holds both {SINGLE_FILE} and {INDEX}; delete the one that is out of date")
    if single.exists():
        return [single]
    if not index.exists():
        for path in (single, index):
            _refuse_dead_link(path)
        raise UserError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX}; only safetensors weights are read")
    paths = []
    for file_name in sorted(set(_read_index(index).values())):
        relative = PurePosixPath(file_name)
        if relative.is_absolute() or ".." in relative.parts:
            raise UserError(f"{index} names {file_name}, which leads out of the folder")
        _refuse_dead_link(folder / relative)
        if not os.path.isfile(folder / relative):  # unlike Path.is_file, it accepts names of any length
            raise UserError(f"{index} names {file_name}, which is missing; copy it again")
        paths.append(folder / relative)
    return paths


def _refuse_dead_link(path: Path) -> None:
    """Raise UserError for a dangling link, as in a pruned HuggingFace cache."""
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"{path} is a link to {os.path.realpath(path)}, which is missing; download the model again")


def _check_index(folder: Path, file_of: Mapping[str, Path]) -> None:
    index = folder / INDEX
    if not index.exists():
        return
    indexed = _read_index(index)
    for name, file_name in indexed.items():
        if file_of.get(name) != folder / file_name:
            raise UserError(f"{index} says that {name} is in {file_name}, which does not hold it")
    if unnamed := sorted(file_of.keys() - indexed.keys()):
        raise UserError(f"{file_of[unnamed[0]]} holds {unnamed[0]}{_and_more(unnamed)}, which {INDEX} does not name")


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise UserError(f"{index} has no weight_map from tensor names to file names")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; give the folder of a model in HuggingFace form") from error
    except NotADirectoryError as error:
        raise UserError(f"{path.parent} is a file; give the folder that has {path.name}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); change that or copy it again") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; copy it again")
    return content
