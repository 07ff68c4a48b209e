"""Memory of tensors without values: what is alive, and the most that ever was."""

import weakref
from itertools import count
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.rehearsal.operands import tensors_of


class Alive(TorchDispatchMode):
    """Inside, counts the memory of tensors that are made; it is given back when the last view of it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        """Memory of what was made inside and is still there."""
        self.peak = 0
        """The most that `nbytes` was."""
        self.storages: dict[int, int] = {}
        """Number of a storage that is there -> its bytes. Numbers go up, and none is used again."""
        self._number_of: dict[int, int] = {}
        self._numbers = count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {id(each.untyped_storage()) for each in _fake((args, kwargs))}
        for tensor in _fake(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given and id(storage) not in self._number_of:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        number, size = next(self._numbers), storage.nbytes()
        self._number_of[id(storage)] = number
        self.storages[number] = size
        self.nbytes += size
        self.peak = max(self.peak, self.nbytes)
        weakref.finalize(storage, self._remove, id(storage))

    def _remove(self, storage_id: int) -> None:
        self.nbytes -= self.storages.pop(self._number_of.pop(storage_id))


def _fake(values: Any) -> list[FakeTensor]:
    return [each for each in tensors_of(values) if isinstance(each, FakeTensor)]
