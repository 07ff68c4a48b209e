"""FP8 KV cache in SGLang on a CPU (0.5.23): its own pool of codes, read by its torch attention.

SGLang supports it only on CPUs with AMX, for kernels of a missing package.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from converters.errors import UserError
from megarl.rollout.sglang.kind import FP8_KEYS_AND_VALUES

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"


def check(hf_config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UserError if SGLang on a CPU cannot hold the model's KV cache in the requested format."""
    if given.get("kv_cache_dtype") == FP8_KEYS_AND_VALUES and "kv_lora_rank" in hf_config:
        raise UserError(
            f"rollout.engine_args.kv_cache_dtype={FP8_KEYS_AND_VALUES} is not for multi-latent attention on a CPU,"
            " where SGLang has none: leave it out"
        )


def register_hooks() -> None:
    """Register the hook that allows the pool on a CPU without AMX."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_CONFIGURATOR}.KVCacheConfigurator.configure", ask_for_no_amx, HookType.AROUND)


def ask_for_no_amx(original: Callable[..., Any], configurator: Any, **named: Any) -> Any:
    """Create FP8 pools on a CPU without AMX, although SGLang requires AMX, and its AMX attention, for them."""
    with ExitStack() as patches:
        if configurator.kv_cache_dtype == torch.float8_e4m3fn:
            for name, answer in (("cpu_has_amx_support", True), ("attention_backends", ["intel_amx"])):
                patches.enter_context(patch(f"{_CONFIGURATOR}.{name}", return_value=answer))
        return original(configurator, **named)
