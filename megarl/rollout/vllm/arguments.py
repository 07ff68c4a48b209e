"""vLLM's own arguments: the environment variables that it reads on import, and EngineArgs by their own names."""

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray

from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json, stated_dtype
from megarl.process.scratch import scratch_folder_of_process
from megarl.rollout.kind import QUANTISATION
from megarl.rollout.vllm import cpu
from megarl.rollout.vllm.kind import ADAPTER_SLOT, GPU_MEMORY_UTILIZATION, MAX_NUM_SEQS, PART_ARGUMENTS, REQUIRED, VLLM
from megatron_ext import device
from megatron_ext.loopback import listen_on_loopback

_ENVIRONMENT: Mapping[str, str] = {
    # The engine core lives in this process and is stepped by our thread.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Buckets are sent to the workers of a tensor-parallel engine as Python objects.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Variable that chooses vLLM's model runner; without it, vLLM falls back to V1 if V2 lacks something."""

_DEFAULT_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # Effectively no limit on the start of data-parallel ranks: the run's own limit (`cluster.engine_start_timeout_s`)
    # applies, not vLLM's ten minutes.
    "VLLM_ENGINE_READY_TIMEOUT_S": str(7 * 24 * 3600),
}

_SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable with the folder of the sockets between an engine's processes."""
_LONGEST_FOLDER = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Longest folder name: the path of a Unix socket has at most 107 characters. With a longer TMPDIR sockets stay at
vLLM's default place.
"""

_DEFAULTS: Mapping[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_seqs": MAX_NUM_SEQS,
    "scheduling_policy": "priority",
    "seed": 0,
}

_WITH_EXPERT_PARALLEL: Mapping[str, Any] = {
    # Otherwise each worker reads and quantises all experts, and keeps only a few.
    "enable_ep_weight_filter": True,
}

_CUDA_DEFAULTS: Mapping[str, Any] = {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION}

_COMPILED_WITH: Mapping[str, Any] = {
    # Part of the key of vLLM's compilation cache, which does not notice the patch of `routers`: a graph compiled by
    # unpatched vLLM would bring rounded logits back.
    "megarl_routers": "float32",
}


def prepare_environment(engine_args: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Set what vLLM reads from the environment. Must run before the first import of vllm in the process.

    On loopback, its ranks rendezvous only there.
    """
    listen_on_loopback()
    os.environ.update(_ENVIRONMENT)
    on_cpu = device.backend() == "gloo"
    # On a GPU the V1 runner would repeat the random numbers of a response's beginning when it is continued; V2 draws by
    # token position. On a CPU `cpu` corrects V1.
    os.environ[_RUNNER] = "0" if on_cpu else "1"
    if VLLM.nodes(engine_args) > 1:
        # The address at which the machines find each other.
        os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
    defaults = {**_DEFAULT_ENVIRONMENT, **(cpu.corrections.ENVIRONMENT if on_cpu else {})}
    if VLLM.nodes(engine_args) > 1 and not ip_address(os.environ["VLLM_HOST_IP"]).is_loopback:
        del defaults["GLOO_SOCKET_IFNAME"]
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # Two sockets per worker, which vLLM 0.32.0 leaves behind in /tmp.
    if _SOCKETS not in os.environ and len(folder := str(scratch_folder_of_process())) <= _LONGEST_FOLDER:
        os.environ[_SOCKETS] = folder


def make_engine_config(model_path: Path, given: Mapping[str, Any]) -> Any:
    """vLLM's VllmConfig for the model in `model_path`: our defaults, overridden by the EngineArgs `given`.

    Raises UserError for an unknown argument, one that must not be set, and a refused value.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.usage.usage_lib import UsageContext

    from megarl.rollout.vllm import adapter_slot, soft_cap, weight_transfer

    # Check before GPU-only arguments are dropped on a CPU.
    VLLM.check(_own_left_out(given))
    hf_config = read_json(model_path / CONFIG)
    if device.backend() == "gloo":
        given = cpu.routed_experts.without_argument(cpu.corrections.without_arguments_of_gpus(given))
        given = cpu.corrections.with_backend_of_draft(hf_config, given)
        cpu.fp8.take_float32_activations()
    backend = adapter_slot.BACKEND if given.get(ADAPTER_SLOT) else weight_transfer.BACKEND
    required = {**REQUIRED, "model": str(model_path), "weight_transfer_config": {"backend": backend}}
    if device.backend() == "gloo":
        cpu.kv_cache.check(hf_config, given)
    # vLLM's own choice for an fp32 model is bfloat16.
    dtype = stated_dtype(hf_config) or "auto"
    on_device = cpu.corrections.engine_arguments(hf_config) if device.backend() == "gloo" else _CUDA_DEFAULTS
    # Match the trainer: vLLM keeps the router of DeepSeek's models in the model's dtype.
    routers = {"moe_router_dtype": "float32"} if "n_routed_experts" in hf_config else {}
    # In the placement group of a Ray actor vLLM would choose Ray workers, which need resources of their own.
    workers = {"distributed_executor_backend": "mp"} if VLLM.workers(given) > 1 else {}
    overrides = {
        "hf_overrides": {**routers, **(given.get("hf_overrides") or {})},
        "additional_config": {**_COMPILED_WITH, **(given.get("additional_config") or {})},
    }
    experts = _WITH_EXPERT_PARALLEL if given.get("enable_expert_parallel") else {}
    overrides |= soft_cap.capping_attention(hf_config, given)
    arguments = {**_DEFAULTS, **experts, "dtype": dtype, **on_device, **workers, **given, **overrides, **required}
    try:
        # Without a usage context vLLM takes its smallest batch size, 2,048 tokens per step, on every GPU.
        return EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    except (ValueError, TypeError, NotImplementedError, VLLMValidationError) as error:
        raise UserError(f"vLLM refuses rollout.engine_args={dict(given)} for {model_path}: {error}") from error


def _own_left_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` without the arguments that megarl sets and users may not."""
    overrides = {name: value for name, value in (given.get("hf_overrides") or {}).items() if name != QUANTISATION}
    own = (*PART_ARGUMENTS, ADAPTER_SLOT)
    return {**{name: value for name, value in given.items() if name not in own}, "hf_overrides": overrides}
