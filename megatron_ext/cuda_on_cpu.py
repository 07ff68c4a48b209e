"""CPU implementations of the CUDA and NCCL calls that megatron-core 0.16.1 makes even without a GPU.

They cover functions of `torch.cuda`, names of devices and types, and features of NCCL that gloo lacks. `device`
installs them if there is no GPU.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


def install() -> None:
    """Replace torch's functions; idempotent."""
    _disable_compilation()
    _replace_cuda_functions()
    _replace_cuda_tensors()
    _complete_gloo()


def is_installed() -> bool:
    """Whether `install` has run in this process."""
    current_device: Any = torch.cuda.current_device
    return current_device is _current_device


def _disable_compilation() -> None:
    # megatron.core.jit compiles small functions, which on a CPU takes minutes of C++ compilation per process. Even
    # decorating one imports the compiler, which takes as long as importing torch.
    setattr(torch, "compile", _as_it_is)  # noqa: B010 - mypy refuses the assignment


def _as_it_is(function: Callable | None = None, **_options: Any) -> Callable:
    """`torch.compile`, with or without options before the function, that leaves the function as it is."""
    return _as_it_is if function is None else function


class _Stream:
    """A CUDA stream or event for which all work is already done."""

    def wait_stream(self, _stream: "_Stream") -> None:
        pass

    def record_event(self) -> "_Stream":
        return _Stream()

    def wait(self, _stream: "_Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Generators:
    """`torch.cuda.default_generators` with the CPU generator as every device's."""

    def __getitem__(self, _index: Any) -> torch.Generator:
        return torch.default_generator


def _nothing(*_args: Any, **_options: Any) -> None:
    return None


def _current_device() -> torch.device:
    return _CPU


def _get_rng_state(*_args: Any, **_options: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *_args: Any, **_options: Any) -> None:
    torch.set_rng_state(state)


_CUDA_REPLACEMENTS: Mapping[str, Any] = {
    "current_device": _current_device,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "Stream": _Stream,
    "current_stream": _Stream,
    "stream": lambda _stream=None: contextlib.nullcontext(),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "default_generators": _Generators(),
    # Without CUDA, torch queues these callbacks forever: the RNG tracker would never restore its state, and the queue
    # would grow with each fork.
    "_lazy_call": lambda callback, **_options: callback(),
    "_lazy_init": _nothing,
}


def _replace_cuda_functions() -> None:
    for name, replacement in _CUDA_REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, _CUDA_REPLACEMENTS[name])


_FACTORIES_GIVEN_CUDA = ("tensor", "zeros", "ones", "empty", "empty_like")


def _replace_cuda_tensors() -> None:
    # `with torch.device(...)` knows factories by identity, from a list made on first use: make it now, with the
    # originals.
    _device_constructors()
    for name in _FACTORIES_GIVEN_CUDA:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name, method in {"cuda": _same_tensor, "type": _named_as_on_cuda(torch.Tensor.type)}.items():
        setattr(torch.Tensor, name, method)


def _same_tensor(self: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return self


def _named_as_on_cuda(original: Callable) -> Callable:
    # The optimizers group parameters by type name, and only know CUDA's.
    @functools.wraps(original)
    def type_or_cast(self: Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **options)

    return type_or_cast


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **options: Any) -> Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = _CPU
        # Without a GPU torch refuses to pin memory.
        options.pop("pin_memory", None)
        return factory(*args, **options)

    return create


def _complete_gloo() -> None:
    for replace in (_all_reduce, _all_to_all_single, _all_gather):
        original = getattr(dist, replace.__name__[1:])
        setattr(dist, replace.__name__[1:], functools.wraps(original)(functools.partial(replace, original)))


def _all_reduce(
    original: Callable, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    # gloo has no average.
    if op == dist.ReduceOp.AVG:
        tensor.div_(dist.get_world_size(group))
        op = dist.ReduceOp.SUM
    return original(tensor, op=op, group=group, async_op=async_op)


def _all_to_all_single(
    original: Callable,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    # The MoE dispatcher converts split sizes from tensors to lists only if they are on a GPU.
    return original(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), group, async_op)


def _as_list(sizes: Any) -> Sequence[int] | None:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _all_gather(
    original: Callable, outputs: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    # gloo only gathers equal shapes, but the MoE dispatcher under expert tensor parallelism gathers uneven rows.
    rows = [len(output) if output.dim() else 1 for output in outputs]
    if len(set(rows)) == 1:
        return original(outputs, tensor, group=group, async_op=async_op)
    padded = [tensor.new_empty(max(rows), *tensor.shape[1:]) for _ in rows]
    original(padded, _pad_rows(tensor, max(rows)), group=group)
    for output, received in zip(outputs, padded, strict=True):
        output.copy_(received[: len(output)])
    return None


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
