"""SGLang's default share of a GPU for weights and KV cache."""

from collections.abc import Mapping
from typing import Any

_MIB = 1024**2
_GIB_IN_MIB = 1024
_OF_MEMORY = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""Per class of GPU: upper limit in GiB, prompt tokens at a time, largest CUDA graph below TP 4, and from TP 4 on."""
_LARGEST = (16384, 512, 512)
"""The same without the limit, for larger GPUs."""
_GRAPH_SIZES = (range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1280, 4097, 256))
"""Token counts with prefill graphs; beyond them every 512."""
_MOST_BY_DEEPEP = 2048
"""Tokens of the largest prefill graph with DeepEP, for which all sizes are multiples of 8."""
_DEEPEP = "deepep"
_DISABLED = "disabled"


def static_share(arguments: Mapping[str, Any], memory_bytes: float, *, is_latent: bool, largest_graph: int) -> float:
    """SGLang 0.5.23's default of `mem_fraction_static`, for these arguments on a GPU with `memory_bytes`.

    It follows SGLang's `handle_gpu_memory_settings`, which counts in MiB. `is_latent` says whether the model has latent
    attention; `largest_graph` is the largest batch size with a CUDA graph, 0 for SGLang's default.
    """
    memory, tensor = memory_bytes / _MIB, arguments.get("tp_size") or 1
    usual_chunk, *graphs = next((rest for below, *rest in _OF_MEMORY if memory < below * _GIB_IN_MIB), _LARGEST)
    chunk = arguments.get("chunked_prefill_size") or usual_chunk
    tokens = chunk if chunk > 0 else arguments.get("max_prefill_tokens") or _LARGEST[0]
    kept = 512 + 1.5 * max(tokens, 2048) + tensor / 8 * _GIB_IN_MIB
    by_deepep = arguments.get("moe_a2a_backend") == _DEEPEP
    has_decode = not _is_off(arguments, "decode")
    kept += 2 * (largest_graph or graphs[tensor >= 4]) * has_decode
    if not _is_off(arguments, "prefill"):
        kept += 1.5 * _GIB_IN_MIB if is_latent else 8 * _graphs_of_prompts(chunk, arguments)
        kept += _GIB_IN_MIB * by_deepep
    if memory > 60 * _GIB_IN_MIB:
        kept = max(kept, 10 * _GIB_IN_MIB)
    kept += 2 * _GIB_IN_MIB * (by_deepep and has_decode)
    return round((memory - kept) / memory, 3)


def _is_off(arguments: Mapping[str, Any], phase: str) -> bool:
    return bool(
        arguments.get("disable_cuda_graph")
        or arguments.get(f"disable_{phase}_cuda_graph")
        or arguments.get(f"cuda_graph_backend_{phase}") == _DISABLED
    )


def _graphs_of_prompts(chunk: int, arguments: Mapping[str, Any]) -> int:
    most, step = min(chunk, arguments.get("max_total_tokens") or chunk), 1
    if arguments.get("moe_a2a_backend") == _DEEPEP:
        most, step = _MOST_BY_DEEPEP, 8
    sizes = [size for each in (*_GRAPH_SIZES, range(4608, most + 1, 512)) for size in each]
    return sum(size <= most and size % step == 0 for size in sizes)
