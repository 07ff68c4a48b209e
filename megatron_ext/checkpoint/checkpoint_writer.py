"""Writes a rank's part of a distributed checkpoint in a thread, while the caller waits or goes on.

megatron-core's own asynchronous writer forks, or passes everything to another process. Forking is unsafe with CUDA, Ray
and gloo threads, and here only file writes and checksums are left, which release the GIL.
"""

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from isal.isal_zlib import crc32, crc32_combine
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from converters.formats.torch_dist import frame
from converters.stream.targets import Written
from megatron_ext import device, versions
from megatron_ext.checkpoint import checkpoint_folder
from megatron_ext.checkpoint.writing_thread import WritingThread
from megatron_ext.memory.host_copies import HostCopies, HostTensor, on_host


@dataclass(frozen=True)
class Plan:
    """The assignment of parts to ranks, and the table of contents; valid for all states with the same parts."""

    local: SavePlan
    central: SavePlan
    metadata: Metadata | None
    """Only on the rank that writes the table of contents."""


class PendingSave:
    """Begin to save `state` to `folder`: collective, as `finish` is.

    With `copies` the data is first copied to host memory, and the caller may change its tensors after
    `wait_until_copied`; otherwise they must not change until `finish`. Passing the `plan` of an earlier save on all
    ranks skips planning and its communication, which take longer the more ranks there are.
    """

    def __init__(self, state: ShardedStateDict, folder: Path, copies: HostCopies | None, plan: Plan | None) -> None:
        self._folder = folder
        self._strategy = _Strategy(copies, plan)
        with self._errors_of_the_disk():
            self._request = dist_checkpointing.save(
                state,
                str(folder),
                self._strategy,
                validate_access_integrity=plan is None,
                async_sharded_save=True,
                content_metadata=_CONTENT,
            )
        # The copies run concurrently with later work on the device.
        device.synchronize()
        self._copied = threading.Event()
        self._thread = WritingThread(device.with_device(self._write))
        self._thread.start()

    @property
    def plan(self) -> Plan:
        """The plan of this save, for later ones."""
        return self._strategy.plan

    def wait_until_copied(self) -> None:
        """Wait until the caller's tensors are no longer read, or copying has failed."""
        self._copied.wait()

    def is_written(self) -> bool:
        """Whether this rank's part is on disk. Raises the error of a failed write, as `disk_error` for the disk."""
        return self._thread.is_done()

    def wait_until_written(self) -> float:
        """Wait until this rank's part is on disk; return the seconds it took.

        Not collective. Raises as `is_written`.
        """
        return self._thread.wait()

    def finish(self) -> None:
        """Wait for all ranks (a collective) and write the table of contents. Raises as `is_written`."""
        self.wait_until_written()
        with self._errors_of_the_disk():
            self._request.execute_sync()
            if torch.distributed.get_rank() == 0:
                checkpoint_folder.list_written(self._folder, self._strategy.writer.written)

    def _write(self) -> None:
        with self._errors_of_the_disk():
            try:
                self._strategy.writer.copy()
            finally:
                self._copied.set()
            self._strategy.writer.write()

    @contextmanager
    def _errors_of_the_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise checkpoint_folder.disk_error(error, self._folder.parent) from error


_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""Metadata of the format, by which megatron-core chooses how to read the checkpoint."""


class _Strategy(versions.SaveStrategy):
    """Plans a save as megatron-core does, or uses a given plan; the caller runs the `writer`."""

    writer: "_Writer"
    plan: Plan

    def __init__(self, copies: HostCopies | None, known: Plan | None) -> None:
        super().__init__("torch_dist", 1)
        self._copies, self._known = copies, known

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path, *_: str) -> AsyncRequest:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        state = mcore_to_pyt_state_dict(by_key, is_loading=False)
        self.writer = _Writer(checkpoint_dir, self._copies)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        known = self._known
        (writer, metadata, ranks), central, local, *_ = save_state_dict_async_plan(
            state,
            self.writer,
            None,
            0,
            planner=planner,
            cached_ckpt_structure=None if known is None else (known.central, known.local, True),
        )
        self.plan = known or Plan(local, central, metadata)
        return AsyncRequest(None, (), [lambda: save_state_dict_async_finalize(writer, self.plan.metadata, ranks)])

    def can_handle_sharded_objects(self) -> bool:
        return True


@dataclass(frozen=True)
class _Checked(WriteResult):
    crc32: int


class _Writer(FileSystemWriterAsync):
    """Writes the items of this rank's plan to one file, one after the other.

    A tensor that was not copied before is copied to the host when its turn comes, so at most one is held at a time.
    """

    def __init__(self, folder: str | Path, copies: HostCopies | None) -> None:
        super().__init__(folder)
        self.written: Mapping[str, list[Written]] = {}
        """Writes of all ranks, on the rank that writes the table of contents, for the manifest."""
        self._copies = copies
        self._results: list[WriteResult] = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Note the items to write."""
        self._name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        self._items: list[tuple[WriteItem, Any]] = [(item, planner.resolve_data(item)) for item in plan.items]

    def copy(self) -> None:
        """Copy the tensors that may change to the host."""
        if self._copies is not None:
            copies = self._copies.of([data for _, data in self._items if isinstance(data, Tensor)])
            self._items = [(item, next(copies) if isinstance(data, Tensor) else data) for item, data in self._items]

    def write(self) -> None:
        """Write the file and sync it to disk. Raises OSError if that fails."""
        if not self._items:
            return
        with (Path(self.checkpoint_dir) / self._name).open("wb") as file:
            while self._items:
                item, data = self._items.pop(0)
                self._results.append(self._write_item(file, item, data))
            file.flush()
            os.fsync(file.fileno())

    def _write_item(self, file: Any, item: WriteItem, data: Any) -> "_Checked":
        start = file.tell()
        if isinstance(data, Tensor):
            data = on_host(data)
        pieces = _framed(data) if isinstance(data, HostTensor) else [(content := data.getbuffer(), crc32(content))]
        for content, _ in pieces:
            file.write(content)
        length = file.tell() - start
        return _Checked(item.index, length, _StorageInfo(self._name, start, length), _joined(pieces))

    def retrieve_write_results(self) -> list[WriteResult]:
        """The items of this rank, with their places."""
        return self._results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents, without the ranks' plans, which are never read."""
        vars(metadata).pop("all_local_plans", None)
        self.written = {
            each.index.fqn + (str(list(each.index.offset)) if each.index.offset is not None else ""): [
                Written(each.storage_data.relative_path, each.storage_data.offset, each.storage_data.length, each.crc32)
            ]
            for each in chain.from_iterable(cast(list[list[_Checked]], results))
        }
        super().finish(metadata, results)


def _framed(tensor: HostTensor) -> list[tuple[Any, int]]:
    """A tensor as `torch.save` writes it, in pieces, each with its CRC-32."""
    contents = [(content, crc32(content)) for content in map(_bytes_of, tensor.pieces)]
    checksum = _joined(contents)
    head, tail = frame(tensor.dtype, tensor.shape).around(checksum)
    return [(head, crc32(head)), *contents, (tail, crc32(tail))]


def _joined(pieces: Iterable[tuple[Any, int]]) -> int:
    """The CRC-32 of pieces that follow each other, each with its own."""
    return reduce(lambda checksum, piece: crc32_combine(checksum, piece[1], len(piece[0])), pieces, 0)


def _bytes_of(elements: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, which lives as long as they do.

    `Tensor.numpy` would make the storage non-resizable, but a rank that takes turns must free its memory.
    """
    if not elements.nbytes:
        return memoryview(b"")
    content: Any = (ctypes.c_ubyte * elements.nbytes).from_address(elements.data_ptr())
    content.owner = elements
    return memoryview(content).cast("B")
