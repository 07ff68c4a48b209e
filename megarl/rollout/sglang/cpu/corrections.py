"""Corrections of SGLang on a CPU (0.5.23), one function each. Nothing here runs on a GPU.

SGLang's kernels are published only for CUDA. Its CPU platform computes in plain torch if the operator
`convert_weight_packed` is missing, so little more than these kernels' names is needed.
"""

import importlib.machinery
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megarl.rollout.sglang.parent import end_with_parent
from megarl.rollout.worker_memory import WorkerMemory


def environment(workers: int) -> dict[str, str]:
    """The environment of a CPU server with `workers` workers."""
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        # The first generation would spend seconds on compiling the sampler, and need a compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # Without it the number of workers is limited to that of NUMA nodes.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join([cores] * workers),
    }


ARGUMENTS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    # The default is a share of the machine's memory.
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    "disable_overlap_schedule": True,
    # By default an idle worker busy-waits, taking a core from trainer and rewards.
    "sleep_on_idle": True,
    # For the adapter slot; the other backends need Triton.
    "lora_backend": "torch_native",
}
"""Defaults of SGLang's ServerArgs on a CPU."""


def install() -> None:
    """Apply all corrections to this process, before SGLang is imported."""
    stand_in_for_kernels()
    draw_by_hash()
    import_torchvision_without_cuda()


def stand_in_for_kernels() -> None:
    """Install a stand-in package `sgl_kernel` with the two operators that the CPU path calls; others raise when called.

    It must not have `convert_weight_packed`, whose presence makes SGLang pack weights for AMX.
    """
    kernels = types.ModuleType("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    kernels.__version__ = "0.4.10"  # type: ignore[attr-defined]
    kernels.assign_req_to_token_pool_cpu = _assign_to_pool  # type: ignore[attr-defined]
    kernels.assign_extend_cache_locs_cpu = _take_from_pool  # type: ignore[attr-defined]
    kernels.__getattr__ = _missing  # type: ignore[method-assign]
    sys.modules["sgl_kernel"] = kernels
    # Looked up when SGLang is imported, but called only by vision models.
    _define("sgl_kernel", "apply_rotary_pos_emb_cpu", "flash_attn_varlen_func", "conv3d_embed_cpu")


def draw_by_hash() -> None:
    """Define the operator that derives a sample's random numbers from its seed.

    In SGLang it is a Triton kernel, or on a CPU one of the missing package.
    """
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seeds, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _libraries.append(library)


def murmur_hash32(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 of (seed, position, column), 16 bytes: int64 [seeds, columns] below 2^32.

    Products wrap at 64 bits, which leaves their lower half as it is.
    """
    wide = seeds.view(torch.int64)[:, None]
    words = (wide & _MASK, (wide >> 32) & _MASK, positions.long()[:, None] & _MASK, columns.long()[None] & _MASK)
    state = torch.zeros((), dtype=torch.int64)
    for word in words:
        word = _rotated((word * 0xCC9E2D51) & _MASK, 15)
        state = state ^ ((word * 0x1B873593) & _MASK)
        state = (_rotated(state, 13) * 5 + 0xE6546B64) & _MASK
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def import_torchvision_without_cuda() -> None:
    """Let torchvision, which SGLang imports, be imported beside a CPU torch.

    Its compiled part needs CUDA's libraries and does not load; the Python part asks for two operators of it.
    """
    _define("torchvision", "nms", "qnms")


def register_hooks() -> None:
    """Tell SGLang's registry of hooks those for a CPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_HOST_MEMORY}._cuda_host_register", leave_memory_unpinned, HookType.REPLACE)
    for function in ("lora_manager.LoRAManager.init_state", f"{_ADAPTERS_IN_TORCH}.prepare_lora_batch"):
        HookRegistry.register(f"sglang.srt.lora.{function}", pin_nothing, HookType.AROUND)
    HookRegistry.register("sglang.srt.configs.update_config.get_moe_padding_size", pad_no_layer, HookType.AROUND)
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork_one_worker, HookType.AFTER)


def pad_no_layer(original: Callable[[Any], int], block: Any) -> int:
    """Cut the inner rows of gated layers over workers as they are, where SGLang adds rows up to a multiple of 32.

    Kernels for AMX want such; adapters are cut as if they had these rows, and do not go into their slot.
    """
    return 1 if block is None else original(block)


def fork_one_worker(_: Any, server_args: Any) -> None:
    """Have the processes of a server of one worker forked, with all that is imported.

    Each would import torch, transformers and SGLang again, which is most of what a start takes on a CPU. Several
    workers are new processes, as on GPUs.
    """
    if server_args.tp_size == 1:
        os.register_at_fork(after_in_child=end_with_parent)
        multiprocessing.set_start_method("fork", force=True)


def leave_memory_unpinned(*_: Any, **__: Any) -> None:
    """Do not pin host memory, which no GPU reads.

    SGLang keeps routed experts in memory that it pins by CUDA, even on a CPU, where a torch without CUDA raises.
    """


def pin_nothing(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Do not pin the adapters' memory: SGLang does on every device, and torch without CUDA raises."""
    with _Unpinned():
        return original(*arguments, **named)


class _Unpinned(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def memory_of(runner: Any) -> WorkerMemory:
    """The weights and KV cache of a worker, to offload: on a CPU SGLang's own call reports success but does nothing.

    `runner` is SGLang's ModelRunner.
    """
    if not hasattr(runner, "megarl_memory"):
        pool, model = runner.token_to_kv_pool, runner.model

        def caches() -> Iterator[Tensor]:
            # kv_buffer is latent attention's.
            for buffers in ("kv_buffer", "k_buffer", "v_buffer"):
                yield from getattr(pool, buffers, ())

        def derived() -> Iterator[Tensor]:
            for module in model.modules():
                made = (getattr(module, name, None) for name in _MADE_OF_WEIGHTS)
                yield from (each for each in made if isinstance(each, Tensor))

        runner.megarl_memory = WorkerMemory(model, caches, derived)
    return runner.megarl_memory


_MADE_OF_WEIGHTS = ("w_kc", "w_vc")
"""Attributes of latent attention with copies of kv_b_proj's keys and values per head."""
_ADAPTERS_IN_TORCH = "backend.torch_backend.TorchNativeLoRABackend"
_HOST_MEMORY = "sglang.srt.mem_cache.pool_host.common"
_MASK = 0xFFFFFFFF


def _rotated(words: Tensor, by: int) -> Tensor:
    return ((words << by) | (words >> (32 - by))) & _MASK


_libraries: list[torch.library.Library] = []
"""Kept alive, since operators are unregistered with the library that defined them."""


def _define(namespace: str, *names: str) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    for name in names:
        library.define(f"{name}(Tensor x) -> Tensor")
    _libraries.append(library)


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"SGLang's kernel {name} is not there on a CPU")

    return refuse


def _assign_to_pool(rows: Tensor, pool: Tensor, starts: Tensor, ends: Tensor, places: Tensor, _length: int) -> None:
    """Write each request's slots in the KV cache, which are concatenated in `places`, into its row of the pool."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[row, start:end] = places[done : done + end - start].to(pool.dtype)
        done += end - start


def _take_from_pool(rows: Tensor, pool: Tensor, starts: Tensor, ends: Tensor, places: Tensor, _length: int) -> None:
    """Read what `_assign_to_pool` wrote, into `places`."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[done : done + end - start] = pool[row, start:end].to(places.dtype)
        done += end - start
