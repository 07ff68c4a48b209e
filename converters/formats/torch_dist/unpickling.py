"""Unpickles without running code of the file: only known classes, with inert records in place of all others.

`pickle` calls anything that a file names. Here only names on a list are resolved; others become `Inert`, a class that
stores nothing and does nothing, so that objects of other programs do no harm.
"""

import argparse
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from converters.errors import UserError

_METADATA_CLASSES = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    _StorageInfo,
    OrderedDict,
    argparse.Namespace,
    torch.Size,
    set,
    frozenset,
)
_KNOWN: Mapping[tuple[str, str], Any] = {
    **{(each.__module__, each.__qualname__): each for each in _METADATA_CLASSES},
    **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
    ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
}


class Inert:
    """Stands for an object of a class that is not on the list."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> "Inert":  # noqa: ARG004
        """Create an empty record, ignoring all arguments."""
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **keywords: Any) -> "Inert":  # noqa: ARG002
        """Return this record, ignoring all arguments."""
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Nothing is kept."""

    def extend(self, values: Any) -> None:
        """Nothing is kept."""

    def add(self, value: Any) -> None:
        """Nothing is kept."""

    def __hash__(self) -> int:
        return id(self)


class SafeUnpickler(pickle.Unpickler):
    """Unpickles the classes on the list, and those of `more`; everything else becomes `Inert`."""

    def __init__(
        self,
        content: bytes,
        more: Mapping[tuple[str, str], Any] | None = None,
        persistent: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._known = {**_KNOWN, **(more or {})}
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        """The class on the list, or `Inert`."""
        return self._known.get((module, name), Inert)

    def persistent_load(self, identity: Any) -> Any:
        """Resolve a tensor's storage, which torch keeps outside the pickle."""
        return self._persistent(identity)


def safe_load(content: bytes, where: object, **options: Any) -> Any:
    """Unpickle `content`. Raises UserError, naming `where`, if it is not a pickle."""
    try:
        return SafeUnpickler(content, **options).load()
    except Exception as error:
        raise UserError(f"{where} is damaged, or not what its name says ({error}); copy it again") from error
