"""Transformer Engine's Adam and its kernels for lists of tensors, as they are in 2.11, played on the CPU."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as core_optimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from megatron_ext import device

MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30, 6: 24}
"""Number of lists -> tensors of each that a launch takes: `depth_to_max_tensors`."""
MOST_BLOCKS = 320


class MultiTensorApply:
    """How Python comes to the kernels."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, kernel: Callable[..., Any], skip: Tensor, lists: list[list[Tensor]], *arguments: Any) -> Any:
        own = [[each._local_tensor if isinstance(each, DTensor) else each for each in tensors] for tensors in lists]
        return kernel(self.chunk_size, skip, own, *arguments)


CHUNK = 2048 * 32
multi_tensor_applier = MultiTensorApply(CHUNK)


def launched(lists: Sequence[Sequence[Tensor]], chunk_size: int) -> set[tuple[int, int]]:
    """Tensors, and the chunks of them, that `multi_tensor_apply` in multi_tensor_apply.cuh hands to a kernel.

    Raises IndexError where it writes behind its tables.
    """
    most, done, pending, tensors = MOST_TENSORS[len(lists)], set(), [], 0
    for place, tensor in enumerate(lists[0]):
        if tensors == most:
            raise IndexError(f"tensor {place} is written behind a table of {most}")
        tensors += 1
        chunks = -(-tensor.numel() // chunk_size)
        for chunk in range(chunks):
            pending.append((place, chunk))
            is_last = chunk == chunks - 1
            if (tensors == most and is_last) or len(pending) == MOST_BLOCKS or (place == len(lists[0]) - 1 and is_last):
                done.update(pending)
                pending, tensors = [], 0 if is_last else 1
    return done


def multi_tensor_adam(
    chunk_size: int,
    _skip: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    weight_decay: float,
) -> None:
    """A step of gradients, parameters and their two moments; of moments the first elements, however many there are."""
    for place, chunk in launched(lists, chunk_size):
        size = lists[0][place].numel()
        of_chunk = slice(chunk * chunk_size, min((chunk + 1) * chunk_size, size))
        gradient, own, mean, square = (tensors[place].view(-1)[of_chunk] for tensors in lists)
        adamw(
            [own],
            [gradient],
            [mean],
            [square],
            [],
            [torch.tensor(step - 1.0)],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )


class FusedAdam(torch.optim.Optimizer):
    """Moments that it makes itself have the shape of the whole parameter, also where a rank has rows of it."""

    def __init__(self, params: list[dict[str, Any]], *, adam_w_mode: bool, **defaults: Any) -> None:
        assert adam_w_mode
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: list[list[Tensor]] = [[], [], [], []]
            for whole in group["params"]:
                state = self.state[whole]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros(whole.shape, dtype=torch.float32)
                for tensors, tensor in zip(
                    lists, (whole.grad.data, whole.data, state["exp_avg"], state["exp_avg_sq"]), strict=True
                ):
                    tensors.append(tensor)
            multi_tensor_applier(
                multi_tensor_adam,
                torch.zeros(1, dtype=torch.int),
                lists,
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                group["weight_decay"],
            )


@contextmanager
def beside_fused_adam() -> Iterator[None]:
    """Inside, models that were made before get the optimizers of Transformer Engine, and train with them."""
    module = ModuleType("transformer_engine.pytorch.optimizers")
    module.MultiTensorApply = MultiTensorApply  # type: ignore[attr-defined]
    parts = ("transformer_engine", "transformer_engine.pytorch")
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(sys.modules, {**{name: ModuleType(name) for name in parts}, module.__name__: module})
        )
        stack.enter_context(mock.patch.object(MultiTensorApply, "__call__", MultiTensorApply.__call__))
        stack.enter_context(mock.patch.object(device, "has_transformer_engine", return_value=True))
        stack.enter_context(mock.patch.object(core_optimizer, "USING_PYTORCH_OPTIMIZER", new=False))
        stack.enter_context(mock.patch.object(core_optimizer, "Adam", FusedAdam))
        yield
