"""Builds the workers of a vLLM engine from vLLM's own modules, without memory and one by one in this process."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from converters.layout import Shape
from megarl.rollout.kind import Arguments
from megarl.rollout.rehearsed_worker import RehearsedWorker
from megarl.rollout.vllm.arguments import make_engine_config, prepare_environment
from megarl.rollout.vllm.kind import FP8_KEYS_AND_VALUES, VLLM

# A worker's machine does not affect what it holds.
_OF_MACHINES = ("nnodes",)


def rehearse_workers(
    hf_config: Mapping[str, Any],
    arguments: Arguments,
    hf_shapes: Mapping[str, Shape],
    hf_dtypes: Mapping[str, torch.dtype],
) -> list[RehearsedWorker]:
    """See `EngineKind.rehearsal`."""
    given = {name: value for name, value in arguments.items() if name not in _OF_MACHINES}
    given |= VLLM.without_weights
    # On a CPU vLLM has no such cache for latent attention; it is counted all the same.
    in_fp8 = "kv_lora_rank" in hf_config and given.get("kv_cache_dtype") in FP8_KEYS_AND_VALUES
    if in_fp8:
        del given["kv_cache_dtype"]
    # Silence warnings, which would be about the CPU that the rehearsal runs on.
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM's first import warns before it reads that variable.
    logging.getLogger("vllm").setLevel(level)
    prepare_environment(given)
    # Importing it applies the patches of a worker process.
    import megarl.rollout.vllm.worker  # noqa: F401

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(hf_config)))
        return [
            _rehearse(make_engine_config(Path(folder), given), worker, hf_shapes, hf_dtypes, latent_in_fp8=in_fp8)
            for worker in range(VLLM.workers(given))
        ]


def _rehearse(
    config: Any,
    worker: int,
    hf_shapes: Mapping[str, Shape],
    hf_dtypes: Mapping[str, torch.dtype],
    *,
    latent_in_fp8: bool,
) -> RehearsedWorker:
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from megarl.rollout.vllm.fake_ranks import WithoutMemory, fake_rank
    from megarl.rollout.vllm.tracing import trace_distinct_layers

    model_config = config.model_config
    with fake_rank(config, worker), set_default_torch_dtype(model_config.dtype):
        with WithoutMemory():
            model = initialize_model(config, model_config=model_config)
            _fill_scales_of_tensors(model)
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        caches = _caches(config)
        if latent_in_fp8:
            caches = [replace(spec, dtype=torch.uint8) for spec in caches]
        longest = sum(spec.max_memory_usage_bytes(config) for spec in caches)
        trace = trace_distinct_layers(model, model_config, hf_shapes, hf_dtypes)
        group = config.parallel_config.data_parallel_index
        weights = held_bytes(model) + (slot_bytes(model, config) if config.lora_config else 0)
        return RehearsedWorker(weights, longest, model_config.max_model_len, group, trace)


def _fill_scales_of_tensors(model: nn.Module) -> None:
    """Materialise NVFP4's scales per matrix, which vLLM compares after loading."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("_global_scale"):
                module._parameters[name] = materialize_meta_tensor(parameter).fill_(1)


def held_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, counting shared memory once."""
    storages = (each.untyped_storage() for each in (*model.parameters(), *model.buffers()))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def slot_bytes(model: nn.Module, config: Any) -> int:
    """Give a model the slot of an adapter, as `load_lora_model` does; return its bytes."""
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
    model = manager.create_lora_manager(model, config)
    adapted = (module for module in model.modules() if isinstance(module, BaseLayerWithLoRA))
    # The slot of experts is seen through one more attribute, as the matrices of each expert.
    tensors = (value for module in adapted for name, value in vars(module).items() if name.endswith("_stacked"))
    slot = [each for value in tensors for each in value if isinstance(each, Tensor)]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in slot}.values())


def _caches(config: Any) -> list[Any]:
    """The KV cache specification of every attention layer."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    return [spec for layer in layers if (spec := layer.get_kv_cache_spec(config)) is not None]
