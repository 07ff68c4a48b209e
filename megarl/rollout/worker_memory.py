"""Offloads an engine worker's memory and brings it back, for engines whose allocator cannot."""

from collections.abc import Callable, Collection, Iterable
from typing import get_args

import torch
from torch import Tensor

from megarl.rollout.protocol import EngineMemory
from megatron_ext.memory.device_memory import CountedMemory
from megatron_ext.memory.storages import HostCopy, free, nbytes_of, storages_of

_WEIGHTS: EngineMemory = "weights"
_KV_CACHE: EngineMemory = "kv_cache"


def require(away: Collection[EngineMemory], *needed: EngineMemory) -> None:
    """Raise RuntimeError if a needed part is away."""
    if missing := sorted(set(away).intersection(needed)):
        raise RuntimeError(f"the engine sleeps, without its {missing[0]}: it is not its turn")


class WorkerMemory:
    """The weights and KV cache of a worker's model.

    `caches` returns the tensors that consist entirely of KV cache, `derived` the tensors that the engine derives from
    weights in addition to the model's parameters and buffers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        caches: Callable[[], Iterable[Tensor]] = lambda: (),
        derived: Callable[[], Iterable[Tensor]] = lambda: (),
    ) -> None:
        self._model, self._caches, self._derived = model, caches, derived
        self._weights: HostCopy | None = None
        self._kv_cache: list[tuple[torch.UntypedStorage, int]] = []
        """Freed storages, with their former sizes in bytes."""
        self._memory: CountedMemory | None = None

    def count_in(self, memory: CountedMemory) -> None:
        """Count the held memory in `memory` from now on. Raises DeviceFullError if it is too much."""
        self._memory = memory
        self._hold(_WEIGHTS, nbytes_of(self._weight_storages()))
        self._hold(_KV_CACHE, nbytes_of(self._cache_storages()))

    def sleep(self) -> None:
        """Free all memory that is not away already; the weights are copied to the host."""
        if self._weights is None:
            self._weights = HostCopy(self._weight_storages())
            self._hold(_WEIGHTS, 0)
        if not self._kv_cache:
            self._kv_cache = [(storage, storage.nbytes()) for storage in self._cache_storages()]
            for storage, _ in self._kv_cache:
                free(storage)
            self._hold(_KV_CACHE, 0)

    def wake_up(self, parts: Collection[str] = get_args(EngineMemory)) -> None:
        """Reallocate these parts: weights as they were, the KV cache zeroed, as a new one is."""
        if self._weights is not None and _WEIGHTS in parts:
            self._hold(_WEIGHTS, self._weights.nbytes)
            self._weights.reload()
            self._weights = None
        if self._kv_cache and _KV_CACHE in parts:
            self._hold(_KV_CACHE, sum(size for _, size in self._kv_cache))
            for storage, size in self._kv_cache:
                storage.resize_(size)
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
            self._kv_cache = []

    def _weight_storages(self) -> list[torch.UntypedStorage]:
        found = storages_of([*self._model.parameters(), *self._model.buffers(), *self._derived()])
        # A memory-mapped checkpoint, as transformers makes it on a CPU, belongs to the file and cannot be freed.
        return [storage for storage in found if storage.resizable()]

    def _cache_storages(self) -> list[torch.UntypedStorage]:
        return storages_of(self._caches())

    def _hold(self, part: EngineMemory, nbytes: int) -> None:
        if self._memory is not None:
            self._memory.hold(f"the {part} of an engine", nbytes)
