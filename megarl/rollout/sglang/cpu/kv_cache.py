"""Keys and values in FP8 in SGLang on a CPU (0.5.23): its own pool of codes, read by its attention in torch.

SGLang has them on CPUs with AMX only, for kernels of a package that is not there.
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
    """Raise UserError where SGLang on a CPU cannot hold the keys and values of a model as it is asked to."""
    if given.get("kv_cache_dtype") == FP8_KEYS_AND_VALUES and "kv_lora_rank" in hf_config:
        raise UserError(
            f"rollout.engine_args.kv_cache_dtype={FP8_KEYS_AND_VALUES} is not for multi-latent attention on a CPU,"
            " where SGLang has none: leave it out"
        )


def register_hooks() -> None:
    """Tell SGLang's registry of hooks the one that lets a CPU without AMX have the pool."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_CONFIGURATOR}.KVCacheConfigurator.configure", ask_for_no_amx, HookType.AROUND)


def ask_for_no_amx(original: Callable[..., Any], configurator: Any, **named: Any) -> Any:
    """Make the pools where the CPU has no AMX, which SGLang asks for, with its attention, where they are FP8."""
    with ExitStack() as patches:
        if configurator.kv_cache_dtype == torch.float8_e4m3fn:
            for name, answer in (("cpu_has_amx_support", True), ("attention_backends", ["intel_amx"])):
                patches.enter_context(patch(f"{_CONFIGURATOR}.{name}", return_value=answer))
        return original(configurator, **named)
