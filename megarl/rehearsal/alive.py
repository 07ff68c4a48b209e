"""Memory of fake tensors: the bytes currently alive, and their peak."""

import weakref
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.rehearsal.operands import tensors_of


class Alive(TorchDispatchMode):
    """Within the context, counts the memory of new tensors, which is released with the last view of it.

    FSDP2 keeps tensors but frees their storage, so a storage counts with its current size.
    """

    def __init__(self, counted: type[Tensor] = FakeTensor) -> None:
        """`counted` is the type of tensors that have memory: in a `fake_rank` other ones are constants."""
        super().__init__()
        self._counted = counted
        self.nbytes = 0
        """Bytes of what was created within the context and is still alive."""
        self.peak = 0
        """Maximum of `nbytes`."""
        self.storages: dict[int, int] = {}
        """Id of an alive storage -> its bytes. Ids increase and are never reused."""
        self._number_of: dict[int, int] = {}
        self._numbers = count()

    def __enter__(self) -> Any:
        # Not an operator, so dispatch modes do not see it.
        resize, alive = torch.UntypedStorage.resize_, self

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            resize(storage, size)
            alive._resize(storage)
            return storage

        self._patched = patch.object(torch.UntypedStorage, "resize_", resize_and_count)
        self._patched.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patched.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {id(each.untyped_storage()) for each in self._tensors((args, kwargs))}
        for tensor in self._tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given and id(storage) not in self._number_of:
                self._add(storage)
        return result

    def _tensors(self, values: Any) -> list[Tensor]:
        return [each for each in tensors_of(values) if isinstance(each, self._counted)]

    def _add(self, storage: torch.UntypedStorage) -> None:
        number, size = next(self._numbers), storage.nbytes()
        self._number_of[id(storage)] = number
        self.storages[number] = size
        self.nbytes += size
        self.peak = max(self.peak, self.nbytes)
        weakref.finalize(storage, self._remove, id(storage))

    def _resize(self, storage: torch.UntypedStorage) -> None:
        number = self._number_of.get(id(storage))
        if number is not None:
            self.nbytes += storage.nbytes() - self.storages[number]
            self.storages[number] = storage.nbytes()
            self.peak = max(self.peak, self.nbytes)

    def _remove(self, storage_id: int) -> None:
        self.nbytes -= self.storages.pop(self._number_of.pop(storage_id))
