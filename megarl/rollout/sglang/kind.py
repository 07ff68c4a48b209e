"""SGLang as a kind of engine: what is supported and what it needs, without importing it."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from converters.errors import UserError
from megarl.rollout.argument_values import DTYPE, PREFIX, SHARE, SIZE, SWITCH, Values
from megarl.rollout.kind import (
    NUMBER_FORMAT,
    QUANTISATION,
    Ability,
    Arguments,
    Cut,
    EngineCuts,
    EngineKind,
    EngineSizes,
    OwnEnvironment,
    quantisation,
    two_at_most,
)
from megarl.rollout.refusal_reasons import DRAFT, MOVED_EXPERTS, OTHER_DISTRIBUTION, OUTLIVES_WEIGHTS, SET_BY_MEGARL
from megarl.rollout.sglang.adapter_arguments import ADAPTER_SLOT, adapter_slot
from megarl.rollout.sglang.installation import KERNELS, OF_MEGARL, SET_UP, installed_versions
from megarl.rollout.sglang.static_memory import static_share
from megatron_ext.options.refusal import Refusal, refuse

if TYPE_CHECKING:
    from converters.architectures import Architecture
    from converters.number_formats import NumberFormat

VERSIONS = ("0.5.23",)
"""Versions of SGLang whose server, sampler and weight handling this code was verified against."""

FP8_KEYS_AND_VALUES = "fp8_e4m3"
"""The value of `kv_cache_dtype` for an e4m3 KV cache."""
OVERRIDES = "json_model_override_args"
"""The argument that adds or overrides fields of config.json."""
MAX_RUNNING_REQUESTS = 512
"""Default of `max_running_requests` on a GPU.

SGLang's own default, 2,048 or more depending on free memory, is known only to its server.
"""
LARGEST_GRAPH = "cuda_graph_max_bs_decode"
"""The argument for the largest batch size with a CUDA graph."""
GRAPH_SIZES = "cuda_graph_bs_decode"
"""The argument that lists all batch sizes with a CUDA graph."""
GRAPH_CHOICES = (LARGEST_GRAPH, GRAPH_SIZES, "disable_cuda_graph", "disable_decode_cuda_graph")
"""Arguments each of which decides which CUDA graphs there are; SGLang itself lets `cuda_graph_config` override them."""
CHUNKED_PREFILL_SIZE = 8192
"""Default of `chunked_prefill_size`: SGLang's own choice on GPUs of 60 to 160 GB."""
MAX_PREFILL_TOKENS = 16384
"""SGLang's default of `max_prefill_tokens`, the limit if prompts are not chunked."""
_SERVER = "the server is of this run alone, and listens where the run finds it"
_WHOLE = "requests are spread over rollout.replicas engines, and each has one group of tensor-parallel workers"
_OTHER_MODEL = "the engine would sample from another model than is trained, and no check of weights sees it"
_ELSEWHERE = "weights lie elsewhere while it serves, and refits write to where they lay at the start"
_COPIES = "copies that it makes of the weights when they are loaded, and computes with, would keep the old ones"
_OTHER_CONFIG = "the trainer follows config.json, of which the engine would make another model"
_TOKENS = "requests are token ids, which have no text"

EXPERT_KERNELS = (
    *("auto", "deep_gemm", "triton", "triton_kernel", "ascend", "flashinfer_trtllm", "experimental_sgl_trtllm"),
    *("flashinfer_trtllm_routed", "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_cutedsl", "flashinfer_megamoe"),
    *("cutlass", "marlin", "humming", "experimental_sgl_marlin", "lora_cutedsl", "lora_triton", "lora_marlin"),
    *("aiter", "intel_xpu"),
)
"""Values of `moe_runner_backend`, except hpc_ops: CUDA graphs keep reading the first copy of its padded scales."""
EXPERT_EXCHANGES = (
    *("none", "deepep", "deepep_v2", "mooncake", "nixl", "mori", "pplx", "flashinfer", "flashinfer_megamoe"),
    *("ascend_fuseep", "ascend_tp"),
)
"""Values of `moe_a2a_backend`, except megamoe, which reorders the rows of experts only at the start."""
_READ_IN_FORMATS = ("auto", "safetensors", "dummy")
_READERS = (*_READ_IN_FORMATS, "fastsafetensors", "instanttensor", "runai_streamer")

REQUIRED: Mapping[str, Any] = {
    "host": "127.0.0.1",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    # Streamed answers contain only new tokens; otherwise each would repeat all earlier ones.
    "incremental_streaming_output": True,
    # The other backends cannot sample by a per-sample seed.
    "sampling_backend": "pytorch",
    # By default requests are served in arrival order, and with priorities the highest first.
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
}
"""Arguments that every server gets, besides those that depend on model and machine."""

_REFUSED: Mapping[str, Refusal] = {
    "model_path": Refusal(SET_BY_MEGARL, ()),
    # The refusal of host has a reason of its own.
    **{name: Refusal(SET_BY_MEGARL, (value,)) for name, value in REQUIRED.items() if name != "host"},
    "speculative_algorithm": Refusal(DRAFT),
    "speculative_draft_model_path": Refusal(DRAFT),
    "host": Refusal(_SERVER),
    "port": Refusal(_SERVER),
    "api_key": Refusal(_SERVER),
    "admin_api_key": Refusal(_SERVER),
    "grpc_mode": Refusal(_SERVER),
    "tokenizer_worker_num": Refusal(_SERVER, (None, 1)),
    "dp_size": Refusal(_WHOLE, (None, 1)),
    "attn_dp_size": Refusal(_WHOLE, (None, 1)),
    "pp_size": Refusal(_WHOLE, (None, 1)),
    "nnodes": Refusal(_WHOLE, (None, 1)),
    "node_rank": Refusal(_WHOLE),
    "dist_init_addr": Refusal(_WHOLE),
    "disaggregation_mode": Refusal(_WHOLE, (None, "null")),
    "enable_eplb": Refusal(MOVED_EXPERTS),
    "elastic_ep_backend": Refusal(MOVED_EXPERTS),
    "enable_hierarchical_cache": Refusal(
        "a refit or sleep would fail on keys and values that are on their way to the host's memory: an engine that is"
        " paused does not look whether they have arrived"
    ),
    "enable_pdmux": Refusal("it goes on sampling while weights change: its loop does not look whether it is paused"),
    "hicache_storage_backend": Refusal(OUTLIVES_WEIGHTS),
    "enable_lmcache": Refusal(OUTLIVES_WEIGHTS),
    "enable_flexkv": Refusal(OUTLIVES_WEIGHTS),
    "enable_unified_cache_external_linker": Refusal(OUTLIVES_WEIGHTS),
    "radix_cache_backend": Refusal(OUTLIVES_WEIGHTS),
    "cpu_offload_gb": Refusal(_ELSEWHERE, (None, 0)),
    "offload_group_size": Refusal(_ELSEWHERE, (None, -1)),
    "weight_cache_mode": Refusal(
        "the weights belong to a process that shares them with other engines, where a refit would change them, too",
        (None, "off"),
    ),
    "moe_runner_backend": Refusal(_COPIES, (None, *EXPERT_KERNELS)),
    "moe_a2a_backend": Refusal(
        "it puts the rows of experts in an order of its own when they are loaded, and never those that come later",
        (None, *EXPERT_EXCHANGES),
    ),
    "enable_nvidia_megakernel": Refusal(_COPIES),
    "enable_amd_monokernel": Refusal(_COPIES),
    "enable_paged_experts": Refusal(_COPIES),
    "dcp_replicate_q_proj": Refusal(_COPIES),
    "enable_cp_decode_attn_tp": Refusal(_COPIES),
    "dwdp_size": Refusal(_COPIES, (None, 1)),
    "kv_cache_dtype": Refusal(
        "keys and values in any other type have not been compared with the trainer's",
        (None, "auto", "bfloat16", "bf16", FP8_KEYS_AND_VALUES),
    ),
    "quantization_param_path": Refusal("the scales of keys and values in it stay as they are while weights change"),
    "load_format": Refusal(
        "weights come from elsewhere than the safetensors of the model's folder, or in another form", (None, *_READERS)
    ),
    "quantization": Refusal(_OTHER_MODEL, (None,)),
    "modelopt_quant": Refusal(_OTHER_MODEL),
    "modelopt_checkpoint_restore_path": Refusal(_OTHER_MODEL),
    "quantize_and_serve": Refusal(_OTHER_MODEL),
    "rl_quant_profile": Refusal(_OTHER_MODEL),
    "kt_weight_path": Refusal(_OTHER_MODEL),
    "enable_w4a4_mxfp4_megamoe": Refusal(_OTHER_MODEL),
    "forward_hooks": Refusal(_OTHER_MODEL, (None,)),
    # The remaining value draws experts at random, for benchmarks.
    "ep_dispatch_algorithm": Refusal(_OTHER_MODEL, (None, "static", "dynamic", "lp")),
    "delete_ckpt_after_loading": Refusal("the trainer, and servers that start later, read the model's folder, too"),
    OVERRIDES: Refusal(f"{_OTHER_CONFIG}; change config.json"),
    "decrypted_config_file": Refusal(f"{_OTHER_CONFIG}; change config.json"),
    "model_config_parser": Refusal(_OTHER_CONFIG, (None, "auto", "hf")),
    ADAPTER_SLOT: Refusal("the slot of the adapter that is trained comes with lora.merge=false"),
    "lora_paths": Refusal("refits alone fill the slot of the adapter that is trained"),
    "enable_custom_logit_processor": Refusal(OTHER_DISTRIBUTION),
    # SGLang would merge them into each request.
    "preferred_sampling_params": Refusal(OTHER_DISTRIBUTION),
    **{
        name: Refusal(OTHER_DISTRIBUTION)
        for name in (
            "enable_watermark",
            "watermark_default_enabled",
            "watermark_enforce_all",
            "watermark_config",
            "watermark_key",
            "watermark_key_b",
        )
    },
    "enable_strict_thinking": Refusal(OTHER_DISTRIBUTION),
    "dllm_algorithm": Refusal(OTHER_DISTRIBUTION),
    "schedule_policy": Refusal("requests of the lowest priority, the oldest draws, go first", (None, "fcfs", "lof")),
    "max_queued_requests": Refusal("the server would give up samples that are asked of it, and they would be lost"),
    "weight_version": Refusal("refits number the weights"),
    "trust_remote_code": Refusal(
        "it runs Python code from the model's folder with the rights of this run, and the trainer takes only"
        " architectures that SGLang has by itself"
    ),
    "tokenizer_path": Refusal(_TOKENS),
    "enable_multimodal": Refusal(_TOKENS),
}

_NO_ROOM = (
    "the server has room for the experts of max_running_requests tokens alone, and dies when it computes more at a time"
)
_BESIDE_EXPERTS: Mapping[str, Refusal] = {
    "moe_a2a_backend": Refusal(
        "each worker chooses the experts of a part of the tokens, and SGLang puts the parts together for DeepEP alone:"
        " tokens would be recorded with experts of others",
        (None, "none", "deepep", "deepep_v2"),
    ),
    "enable_prefill_cp": Refusal(
        "experts are chosen for tokens in the order of the workers that have them, and tokens would be recorded with"
        " experts of others"
    ),
    "enable_two_batch_overlap": Refusal("the experts of one half of a batch are recorded over those of the other"),
    "chunked_prefill_size": Refusal(_NO_ROOM, (None,), at_least=1),
    "enable_mis": Refusal(f"it has prompts computed in one piece, and {_NO_ROOM}"),
    "moe_runner_backend": Refusal(
        "it chooses experts within a kernel, and none are recorded",
        (None, *(each for each in EXPERT_KERNELS if each not in ("triton_kernel", "flashinfer_mxfp4"))),
    ),
}
"""Supported arguments with which SGLang 0.5.23 does not return experts."""

_TESTED: Mapping[str, str] = {
    "context_length": "megarl/rollout/conftest.py",
    "max_total_tokens": "megarl/rollout/conftest.py",
    "max_running_requests": "megarl/rollout/conftest.py",
    "tp_size": "megarl/rollout/test_sglang_server.py",
    "ep_size": "megarl/rollout/test_sglang_server.py",
    "enable_return_routed_experts": "megarl/rollout/test_sglang_engine.py",
}

_VALUES: Mapping[str, Values] = {
    **dict.fromkeys(("tp_size", "ep_size"), SIZE),
    **dict.fromkeys(("context_length", "max_running_requests", "max_total_tokens", "page_size"), SIZE.or_null),
    "mem_fraction_static": SHARE.or_null,
    "dtype": DTYPE,
    **dict.fromkeys(("disable_cuda_graph", "enable_return_routed_experts"), SWITCH),
}


def _workers(arguments: Arguments) -> int:
    return math.prod(arguments.get(f"{kind}_size", 1) or 1 for kind in ("tp", "pp", "dp"))


def _share(arguments: Arguments, memory_bytes: float, is_latent: bool) -> float:
    if given := arguments.get("mem_fraction_static"):
        return given
    sizes = arguments.get(GRAPH_SIZES)
    largest = max(sizes) if sizes else arguments.get(LARGEST_GRAPH)
    samples = arguments.get("max_running_requests", MAX_RUNNING_REQUESTS) or 0
    return static_share(arguments, memory_bytes, is_latent=is_latent, largest_graph=largest or samples)


def _prefill_tokens(arguments: Arguments) -> int:
    chunk = arguments.get("chunked_prefill_size") or CHUNKED_PREFILL_SIZE
    return chunk if chunk > 0 else arguments.get("max_prefill_tokens") or MAX_PREFILL_TOKENS


def _sizes(arguments: Arguments) -> EngineSizes:
    tensor, expert = arguments.get("tp_size") or 1, arguments.get("ep_size") or 1
    if expert not in (1, tensor):
        raise UserError(
            f"rollout.engine_args.ep_size={expert} cuts experts in another way than tp_size={tensor}, which this"
            " command does not know: set it to 1 or to tp_size for this command"
        )
    return EngineSizes(
        tensor,
        expert if expert > 1 else None,
        "bf16",
        is_eager=bool(arguments.get("disable_cuda_graph")),
        kv_bytes=1 if arguments.get("kv_cache_dtype") == FP8_KEYS_AND_VALUES else 2,
    )


def _cuts(arguments: Arguments) -> EngineCuts:
    tensor, expert = arguments.get("tp_size", 1), arguments.get("ep_size", 1)
    if tensor % expert:
        raise UserError(
            f"rollout.engine_args.ep_size={expert} does not divide tp_size={tensor}: experts are shared out to the"
            " workers of tp_size in groups of the same size; set it to a divisor"
        )
    return EngineCuts(Cut(tensor, "tp_size"), Cut(tensor // expert, "tp_size" + " / ep_size" * (expert > 1)))


_BESIDE_FORMATS: Mapping[str, Refusal] = {
    "load_format": Refusal("what it reads could not be quantised", (None, *_READ_IN_FORMATS)),
    "model_impl": Refusal("layers of transformers in a number format have not been compared", (None, "auto", "sglang")),
}
"""Supported arguments that do not work with `rollout.weights`."""


_ONE_KERNEL = "experts in INT8 have one kernel, Triton's, for experts that are each on one worker or cut over all"
_BESIDE_INT8: Mapping[str, Refusal] = {
    "moe_runner_backend": Refusal(_ONE_KERNEL, (None, "auto", "triton")),
    "moe_a2a_backend": Refusal(_ONE_KERNEL, (None, "none")),
}
"""Supported arguments that do not work with INT8 per channel."""
_INT8 = "int8_channel"
W8A8_INT8 = "w8a8_int8"
"""SGLang's name of INT8 per channel."""
_NO_LINEAR_LAYERS = ("embed_tokens", "head")
"""Suffixes of modules that SGLang would treat as linear layers if they were on its list of ignored modules."""


def _quantisation_config(number_format: "NumberFormat", architecture: "Architecture") -> dict[str, Any]:
    """The `quantization_config` of a number format.

    For INT8 per channel it has SGLang's own form, see `megarl.rollout.sglang.int8`.
    """
    config = quantisation(number_format, architecture)
    if number_format.name != _INT8:
        return config
    ignored = [module for module in config["ignore"] if not module.endswith(_NO_LINEAR_LAYERS)]
    return {"quant_method": W8A8_INT8, "ignore": ignored, NUMBER_FORMAT: number_format.name}


def _quantised(arguments: Arguments, number_format: "NumberFormat", architecture: "Architecture") -> Arguments:
    beside = {**_BESIDE_FORMATS, **(_BESIDE_INT8 if number_format.name == _INT8 else {})}
    refuse(arguments, beside, PREFIX, f" with rollout.weights={number_format.name}")
    for name in ("quantization", OVERRIDES):
        if arguments.get(name) is not None:
            raise UserError(
                f"rollout.engine_args.{name}={arguments[name]} contradicts rollout.weights, which says what the"
                " engine's weights are in: give one of the two"
            )
    tensor, expert = (arguments.get(f"{kind}_size") or 1 for kind in ("tp", "ep"))
    number_format.check(architecture, tensor, max(1, tensor // expert))
    return {**arguments, OVERRIDES: json.dumps({QUANTISATION: _quantisation_config(number_format, architecture)})}


SGLANG = EngineKind(
    title="SGLang",
    engine_class=("megarl.rollout.sglang.engine", "SglangEngine"),
    argument_class=("sglang.srt.server_args", "ServerArgs"),
    refused=_REFUSED,
    tested=_TESTED,
    # No KEPT_KV: SGLang drops the KV cache together with the weights that computed it.
    offers={Ability.LOG_PROBS, Ability.PRIORITIES, Ability.PROGRESS},
    values=_VALUES,
    workers=_workers,
    sizes=_sizes,
    cuts=_cuts,
    max_concurrent_samples=lambda arguments: arguments.get("max_running_requests") or MAX_RUNNING_REQUESTS,
    context_argument="context_length",
    tiny=lambda arguments: two_at_most(arguments, ("tp_size", "ep_size")),
    quantised=_quantised,
    number_formats=("fp8_block", "fp8_block_ue8m0", _INT8),
    memory_share=_share,
    computes_beside=True,
    prefill_tokens=_prefill_tokens,
    kernel_folders={"SGLANG_CACHE_DIR": "sglang", "SGLANG_JIT_CACHE_DIR": "sglang/jit"},
    gpu_share=lambda share: {"mem_fraction_static": share},
    adapter_slot=adapter_slot,
    without_weights={"load_format": "dummy"},
    able_to_sleep={"enable_memory_saver": True, "enable_weights_cpu_backup": True},
    float32_logits={"enable_fp32_lm_head": True},
    returning_experts={"enable_return_routed_experts": True},
    beside_returned_experts=_BESIDE_EXPERTS,
    layout_versions=("0.5",),
    packages={"cuda": "sglang", "cpu": "sglang"},
    own_environment=OwnEnvironment(
        installed_versions, VERSIONS, SET_UP, {"cpu": OF_MEGARL, "cuda": (KERNELS, *OF_MEGARL)}
    ),
)
