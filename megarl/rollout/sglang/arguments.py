"""SGLang's own arguments, by its names: megarl's defaults, the user's values, and required ones."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from converters.errors import UserError, did_you_mean
from converters.formats.safetensors import CONFIG, read_json, stated_dtype
from megarl.rollout.kind import NUMBER_FORMAT, QUANTISATION
from megarl.rollout.sglang import cpu
from megarl.rollout.sglang.adapter_arguments import ADAPTER_SLOT, LORA_ALPHA
from megarl.rollout.sglang.installation import SET_UP
from megarl.rollout.sglang.kind import (
    GRAPH_CHOICES,
    LARGEST_GRAPH,
    MAX_RUNNING_REQUESTS,
    OVERRIDES,
    REQUIRED,
    SGLANG,
    VERSIONS,
    W8A8_INT8,
)
from megatron_ext import device

_DEFAULTS: Mapping[str, Any] = {
    "log_level": "warning",
    # Preempted requests are recomputed, only to let older ones run a little earlier.
    "disable_priority_preemption": True,
    "max_running_requests": MAX_RUNNING_REQUESTS,
    "random_seed": 0,
}


SPARE_TOKENS = 6
"""Tokens of the context that SGLang keeps from prompts (`max_req_input_len`); a response may use four of them."""


def check_version(installed: str) -> None:
    """Raise UserError for a version of SGLang that this code was not verified against."""
    if installed not in VERSIONS:
        raise UserError(
            f"SGLang {installed} is installed, and rollout.engine=sglang knows {' and '.join(VERSIONS)} alone: install"
            f" that, with {SET_UP[device.device().type]}"
        )


def check_names(arguments: Iterable[str], known: Sequence[str]) -> None:
    """Raise UserError for an argument that the installed SGLang does not have."""
    for name in arguments:
        if name not in known:
            advice = did_you_mean(name, known, "rollout.engine_args.{}")
            raise UserError(f"rollout.engine_args.{name}: the installed SGLang has no such option{advice}")


def check_block_fp8(arguments: Mapping[str, Any]) -> None:
    """Raise UserError for block FP8 weights on a GPU for which SGLang repacks them.

    SGLang 0.5.23 repacks them for Marlin below compute capability 8.9. The first call of a worker finishes loading once
    more, finds the scales gone, and the server exits.
    """
    if not device.gpus() or device.has_e4m3(device.device()):
        return
    held = _held_in(arguments)
    if held.get("quant_method") == "fp8" and held.get("weight_block_size"):
        raise UserError(
            "SGLang packs weights in block FP8 on GPUs below compute capability 8.9, and takes no others in their"
            " place: set rollout.weights=as_trained with a model in bf16, or take other GPUs"
        )


def check_int8(arguments: Mapping[str, Any]) -> None:
    """Raise UserError for INT8 weights on a GPU for which SGLang has no linear kernel.

    Its `int8_scaled_mm` raises above compute capability 9.0, but only at the first prompt.
    """
    capability = device.compute_capability()
    if capability is not None and capability > (9, 0) and _held_in(arguments).get("quant_method") == W8A8_INT8:
        raise UserError(
            "SGLang multiplies by weights in INT8 on GPUs up to compute capability 9.0 alone: set"
            " rollout.weights=fp8_block or as_trained, or take other GPUs"
        )


def _held_in(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a server's model; empty if it has none."""
    overrides = json.loads(arguments.get(OVERRIDES) or "{}")
    config = read_json(Path(arguments["model_path"]) / CONFIG)
    return {**config, **overrides}.get(QUANTISATION) or {}


def environment_of_context(model_path: Path, given: Mapping[str, Any]) -> dict[str, str]:
    """The environment that lets the context exceed the model's own limit by the spare tokens, which are never used."""
    longest = read_json(model_path / CONFIG).get("max_position_embeddings") or 0
    needed = given.get("context_length") or 0
    return {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} if needed <= longest < needed + SPARE_TOKENS else {}


def server_arguments(model_path: Path, given: Mapping[str, Any], port: int, key: str) -> dict[str, Any]:
    """Fields of SGLang's ServerArgs for a server of the model in `model_path` with the arguments `given`.

    Raises UserError for a refused value and for arguments that must not be set; the server checks names.
    """
    SGLANG.check(_own_left_out(given))
    hf_config = read_json(model_path / CONFIG)
    _check_layers(hf_config)
    _check_fields(hf_config)
    required = {**REQUIRED, "model_path": str(model_path), "port": port, "api_key": key}
    on_device = cpu.corrections.ARGUMENTS if device.backend() == "gloo" else _graphs(given)
    if device.backend() == "gloo":
        cpu.kv_cache.check(hf_config, given)
        # These arguments let a GPU engine sleep; a CPU worker does without (`cpu.corrections.memory_of`).
        given = {name: value for name, value in given.items() if name not in SGLANG.able_to_sleep}
    if given.get("context_length"):
        given = {**given, "context_length": given["context_length"] + SPARE_TOKENS}
    # An empty slot counts as no weights, too.
    version = "-1" if given.get(ADAPTER_SLOT) or given.get("load_format") == "dummy" else "0"
    return {
        **_DEFAULTS,
        # SGLang's own choice for an fp32 model is half precision.
        "dtype": stated_dtype(hf_config) or "auto",
        # With top-p but no top-k, log-probs are returned for all kept tokens: up to the whole vocabulary.
        "sampling_mask_max_tokens": hf_config["vocab_size"],
        **on_device,
        **{name: value for name, value in given.items() if name != LORA_ALPHA},
        **required,
        "weight_version": version,
    }


def _graphs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Capture CUDA graphs for every batch size that an engine on a GPU runs.

    With fewer than four workers, SGLang's default is up to 256 samples on GPUs of 60 to 160 GB, and less on smaller
    ones; larger batches launch every kernel separately.
    """
    samples = given.get("max_running_requests", MAX_RUNNING_REQUESTS)
    is_chosen = any(given.get(name) for name in GRAPH_CHOICES) or given.get("cuda_graph_backend_decode") == "disabled"
    return {} if is_chosen or samples is None else {LARGEST_GRAPH: samples}


def _check_layers(hf_config: Mapping[str, Any]) -> None:
    found = [
        f"{field}={hf_config[field]}"
        for field, usual in _ALL_SPARSE.items()
        if hf_config.get(field) not in (None, usual)
    ]
    if hf_config["model_type"] == "qwen3_moe" and found:
        raise UserError(
            f"SGLang {VERSIONS[0]} gives every layer of a qwen3_moe model experts, and config.json has dense ones"
            f" ({', '.join(found)}), which would be left out: set another rollout.engine"
        )
    types = hf_config.get("layer_types")
    if hf_config["model_type"] == "gemma2" and types and types != _in_turns(len(types)):
        raise UserError(
            f"SGLang {VERSIONS[0]} gives a gemma2 model sliding and full attention in turns, the first layer sliding,"
            " and layer_types of config.json are others: set another rollout.engine"
        )


def _in_turns(layers: int) -> list[str]:
    return ["full_attention" if each % 2 else "sliding_attention" for each in range(layers)]


def _check_fields(hf_config: Mapping[str, Any]) -> None:
    family = hf_config["model_type"]
    wanted = _READ.get(family, {})
    if missing := [f'"{field}": {json.dumps(value)}' for field, value in wanted.items() if field not in hf_config]:
        raise UserError(
            f"SGLang {VERSIONS[0]} reads fields of a {family}'s config.json that this one lacks, as transformers 5"
            f" writes it: add {', '.join(missing)} there, or set another rollout.engine"
        )
    if wanted and isinstance(hf_config.get("moe_layer_freq"), list):
        raise UserError(
            f"SGLang {VERSIONS[0]} takes a number for moe_layer_freq, and config.json has a list of layers: set another"
            " rollout.engine"
        )


_OF_V3: Mapping[str, Any] = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_READ: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"moe_layer_freq": 1, "topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek_v3": _OF_V3,
    "kimi_k2": _OF_V3,
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
}
"""Model type -> fields of config.json that SGLang reads and transformers leaves out, with transformers' values."""

_ALL_SPARSE: Mapping[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1}
"""Fields of config.json -> their values if every layer has experts."""


def adapter_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter_config.json of the adapter for the slot of an engine with the arguments `given`."""
    return {
        "peft_type": "LORA",
        "r": given["max_lora_rank"],
        "lora_alpha": given[LORA_ALPHA],
        "target_modules": given["lora_target_modules"],
    }


def _own_left_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` without the arguments that megarl sets and users may not: number format and adapter slot."""
    own = {ADAPTER_SLOT, *([OVERRIDES] if NUMBER_FORMAT in (given.get(OVERRIDES) or "") else [])}
    return {name: value for name, value in given.items() if name not in own}
