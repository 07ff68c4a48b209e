"""Where Megatron runs: the one module that knows CPU from CUDA.

Megatron-core is written for CUDA and NCCL. On a machine without a GPU, `install` puts CPU meanings in the place of the
`torch.cuda` functions that megatron-core 0.16.1 calls unconditionally, and completes gloo where NCCL can do more. On a
machine with a GPU it changes nothing.
"""

import contextlib
import functools
import importlib.util
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")


def install() -> None:
    """Make this process ready for megatron-core; idempotent.

    Raises RuntimeError if megatron was imported before: it binds some of the replaced functions on import.
    """
    if torch.cuda.is_available() or getattr(torch.cuda.current_device, "is_cpu_layer", False):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron_ext.device.install() must run before the first import of megatron")
    _disable_compilation()
    _replace_cuda_functions()
    _replace_cuda_tensors()
    _complete_gloo()
    multiply_by_onednn()


def multiply_by_onednn() -> None:
    """Have float32 matrices multiplied by oneDNN on AMD's CPUs: MKL, torch 2.13's default, has half its speed there.

    torch takes oneDNN only where it may round to bfloat16 inside. oneDNN does so with AMX, on ARM and on GPUs, and
    computes in float32 elsewhere: on processors of AMD, none of which has AMX.
    """
    if _is_amd() and not torch.cpu._is_amx_tile_supported():
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]


@functools.cache
def _is_amd() -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "AuthenticAMD" in cpus.read_text()


def device() -> torch.device:
    """Where this rank's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def name() -> str:
    """The kind of device, such as "NVIDIA H100 80GB HBM3", or cpu."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def backend() -> str:
    """The collective backend of `device`: nccl or gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def gpus() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def bind(rank: int) -> None:
    """Give this process its GPU: LOCAL_RANK if the launcher set it, else `rank` modulo the GPUs of the host."""
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def with_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be called in another thread: CUDA's current device is a thread's own, and at first GPU 0."""
    if not torch.cuda.is_available():
        return function
    current = torch.cuda.current_device()

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        torch.cuda.set_device(current)
        return function(*arguments, **options)

    return call


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's modules can be used."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def uuid(index: int | None = None) -> str:
    """The name of a GPU, by default this process's own, that is the same in every process of the host."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid)


def reaches(other: str) -> bool:
    """Whether this process's GPU can read the memory of the GPU with UUID `other`; True if nothing is known of that."""
    own = torch.cuda.current_device()
    visible = {uuid(index): index for index in range(torch.cuda.device_count())}
    return visible.get(other, own) == own or torch.cuda.can_device_access_peer(own, visible[other])


def cuda_version() -> str:
    """The CUDA that torch is built for, such as 13.0; empty where it is built for the CPU."""
    return torch.version.cuda or ""


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class SideStream:
    """Work of this process's GPU beside all other. On a CPU work is done when the call that asks for it returns."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def entered(self) -> contextlib.AbstractContextManager:
        """Inside, what this thread asks for goes to this stream, which waits for nothing that was asked elsewhere."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Wait until what was asked of this stream is done, and for nothing else."""
        if self._stream is not None:
            self._stream.synchronize()


def peak_memory_bytes() -> int:
    """The most memory that this process has held on its device: GPU allocations, or resident memory on CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def used_memory_bytes() -> int | None:
    """How much of this process's GPU is in use, by whatever process; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def empty_cache() -> None:
    """Give memory that this process keeps for later back to its GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def host_memory(size_bytes: int) -> Tensor:
    """uint8 [size_bytes] of the host, which a GPU copies from and to by itself."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _disable_compilation() -> None:
    # megatron.core.jit compiles small functions: on CPU minutes of C++ compilation per process. To decorate one imports
    # the compiler, which takes as long as to import torch.
    setattr(torch, "compile", _as_it_is)  # noqa: B010 - mypy refuses the assignment


def _as_it_is(function: Callable | None = None, **_options: Any) -> Callable:
    """`torch.compile`, with or without options before the function, that leaves the function as it is."""
    return _as_it_is if function is None else function


class _Stream:
    """A CUDA stream, or an event of it, where everything has already happened."""

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
    return CPU


_current_device.is_cpu_layer = True  # type: ignore[attr-defined]


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
    # Without CUDA, torch queues these callbacks for ever: the RNG tracker would never restore its state and the queue
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
    # `with torch.device(...)` knows the factories by identity, from a list made on first use: have the originals in it.
    _device_constructors()
    for name in _FACTORIES_GIVEN_CUDA:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name, method in {"cuda": _same_tensor, "type": _named_as_on_cuda(torch.Tensor.type)}.items():
        setattr(torch.Tensor, name, method)


def _same_tensor(self: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return self


def _named_as_on_cuda(original: Callable) -> Callable:
    # The optimizers sort parameters by the name of their type and know only CUDA's.
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
            options["device"] = CPU
        # Memory that a GPU copies from by itself; without one torch refuses to make any.
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
    # The MoE dispatcher turns split sizes from tensors into lists only if they lie on a GPU.
    return original(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), group, async_op)


def _as_list(sizes: Any) -> Sequence[int] | None:
    return sizes.tolist() if hasattr(sizes, "tolist") else sizes


def _all_gather(
    original: Callable, outputs: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    # gloo gathers equal shapes only; the MoE dispatcher under expert tensor parallelism gathers uneven rows.
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
