"""Offloads a rank's state to the host and reloads it, part by part."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_ext import compat
from megatron_ext.memory.device_memory import ALL_PARTS, CountedMemory, DeviceFullError, StatePart
from megatron_ext.memory.storages import HostCopy, nbytes_of, storages_of
from megatron_ext.optimizer.fully_sharded import gradients, own_rows
from megatron_ext.optimizer.optimizer import Wrapped

_NAMES: Mapping[StatePart, str] = {
    "weights": "the weights of a rank",
    "training": "gradients, optimizer state and reference weights of a rank",
}


class OffloadableState:
    """Keeps each part of a rank's state on the device or on the host.

    Tensors stay the same objects; those of an offloaded part must not be accessed. `weights` and `training` return the
    current tensors of each part, since an optimizer only creates its state in the first step. Memory that both share
    counts as weights. The gradient buffers of `chunks` are freed and allocated again, not copied.
    """

    def __init__(
        self,
        weights: Callable[[], Iterator[Tensor]],
        training: Callable[[], Iterator[Tensor]] = lambda: iter(()),
        chunks: Sequence[Wrapped] = (),
    ) -> None:
        self._weights, self._training, self._chunks = weights, training, chunks
        self._away: dict[StatePart, HostCopy] = {}
        self._gradient_bytes = 0
        self._memory: CountedMemory | None = None

    def count_in(self, memory: CountedMemory | None) -> None:
        """Start counting the memory held in `memory`; None stops it. Raises DeviceFullError as `count` does."""
        self._memory = memory
        self.count()

    def count(self) -> None:
        """Update the count, after the state may have grown. Raises DeviceFullError if it exceeds the limit."""
        if self._memory is not None:
            for part in ALL_PARTS:
                self._memory.hold(_NAMES[part], self._held_bytes(part))

    def has(self, part: StatePart) -> bool:
        """Whether the part is on the device."""
        return part not in self._away

    def require(self, *parts: StatePart) -> None:
        """Raise RuntimeError if one of the parts is on the host."""
        for part in parts:
            if part in self._away:
                raise RuntimeError(f"{_NAMES[part]} are on the host: it is not the trainers' turn")

    def offload(self, parts: Collection[StatePart]) -> None:
        """Move those of the parts that are on the device to the host."""
        for part in ALL_PARTS:
            if part in parts and part not in self._away:
                if part == "training":
                    self._free_gradients()
                self._away[part] = HostCopy(self._storages(part))
                self.count()

    def reload(self, parts: Collection[StatePart]) -> None:
        """Move the parts back to the device, with gradients of zeros. Raises DeviceFullError if there is no room."""
        for part in ALL_PARTS:
            if part in parts and part in self._away:
                if self._memory is not None:
                    gradients = self._gradient_bytes if part == "training" else 0
                    self._memory.hold(_NAMES[part], self._away[part].nbytes + gradients)
                self._bring_back(part)
                del self._away[part]

    def _bring_back(self, part: StatePart) -> None:
        copy = self._away[part]
        try:
            if part == "training":
                self._make_gradients()
            copy.reload()
        except torch.OutOfMemoryError as error:
            # The copy on the host is still complete, so the part can be reloaded later.
            if part == "training":
                self._drop_gradients()
            raise DeviceFullError(
                f"{_NAMES[part]}, {copy.nbytes:,} bytes and gradients, do not fit on the GPU beside what others hold:"
                " give engines a smaller share of it, or cut the model over more ranks"
            ) from error

    def _storages(self, part: StatePart) -> list[torch.UntypedStorage]:
        if part == "weights":
            return storages_of(self._weights())
        # The main parameters of an fp32 model are views of its weights.
        theirs = {tensor.untyped_storage()._cdata for tensor in self._weights()}
        return [storage for storage in storages_of(self._training()) if storage._cdata not in theirs]

    def _held_bytes(self, part: StatePart) -> int:
        if part in self._away:
            return 0
        return nbytes_of(self._storages(part)) + (_gradient_bytes(self._chunks) if part == "training" else 0)

    def _free_gradients(self) -> None:
        self._gradient_bytes = _gradient_bytes(self._chunks)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.offload_grad_buffers(empty_cache=False)

    def _make_gradients(self) -> None:
        for chunk in self._chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.restore_grad_buffers()


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """The current main parameters and state tensors of an optimizer."""
    for inner in (part.optimizer for part in compat.parts(optimizer)):
        for group in inner.param_groups:
            yield from map(own_rows, group["params"])
        for state in inner.state.values():
            yield from (own_rows(value) for value in state.values() if isinstance(value, Tensor))


def _gradient_bytes(chunks: Sequence[Wrapped]) -> int:
    """Bytes of gradients: of Megatron's permanent buffers, or with FSDP2 of the gradients that currently exist."""
    buffered = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    buffers = [buffer for chunk in buffered for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    others = nbytes_of(storages_of(gradients([chunk for chunk in chunks if chunk not in buffered])))
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers) + others
