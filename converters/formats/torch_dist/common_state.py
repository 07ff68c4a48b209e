"""What Megatron-LM's loader wants beside the chunks: format, arguments of the architecture, and FP8 state.

Megatron-LM compares the arguments in `common.pt` with its own, and takes them from there with
`--use-checkpoint-args`. Their names are those of its argument parser, which differ from TransformerConfig's for some.
"""

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from converters.architectures import Architecture
from converters.formats.torch_dist.checkpoint import COMMON
from converters.layouts.parallel_sizes import ParallelSizes
from converters.layouts.torch_dist import cells, has_uniform_layers

FORMAT_FILE = "metadata.json"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CHECKPOINT_VERSION = 3.0
_ARGUMENT_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "num_moe_experts": "num_experts",
    "add_qkv_bias": "add_qkv_bias",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "max_sequence_length": "max_position_embeddings",
}
"""Field of TransformerConfig or argument of GPTModel -> argument of Megatron-LM, where they differ."""
_WITHOUT_EXTRA_STATE = ("embedding.", "output_layer.", "mlp.router.")
_MTP_ATTENTION = "mtp.layers.{layer}.transformer_layer.self_attention.core_attention"


def write_common_state(
    folder: Path, architecture: Architecture, parallel: ParallelSizes, padded_vocabulary: int, dtype: torch.dtype
) -> None:
    """Write `metadata.json` and `common.pt`."""
    (folder / FORMAT_FILE).write_text(json.dumps(_FORMAT))
    arguments = argparse.Namespace(**_arguments(architecture, parallel, padded_vocabulary, dtype))
    state = {
        "args": arguments,
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False},
    }
    torch.save(state, folder / COMMON)


def _arguments(
    architecture: Architecture, parallel: ParallelSizes, padded_vocabulary: int, dtype: torch.dtype
) -> dict[str, Any]:
    fields = {**architecture.transformer_config, **architecture.gpt_model}
    arguments = {_ARGUMENT_NAMES.get(name, name): value for name, value in fields.items() if _is_plain(value)}
    groups = fields.get("num_query_groups")
    return {
        **arguments,
        "swiglu": fields["gated_linear_unit"] and fields["activation_func"] is torch.nn.functional.silu,
        "group_query_attention": groups is not None and groups != fields["num_attention_heads"],
        "untie_embeddings_and_output_weights": not fields["share_embeddings_and_output_weights"],
        "seq_length": fields["max_sequence_length"],
        "padded_vocab_size": padded_vocabulary,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        **{name: value for name, value in vars(parallel).items() if value is not None},
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
    }


def _is_plain(value: Any) -> bool:
    """Whether reading it back needs no code: not a function, for example."""
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def extra_state_keys(architecture: Architecture) -> Iterator[str]:
    """Keys of the FP8 state that Transformer Engine's modules look for, even if it is empty."""
    seen = set()
    for cell in cells(architecture, uniform=has_uniform_layers(architecture)):
        module = cell.key.rpartition(".")[0]
        if any(part in f"{module}." for part in _WITHOUT_EXTRA_STATE):
            continue
        place = ".".join(map(str, cell.index or (0,))) + "_" + ".".join(map(str, cell.leading or (1,)))
        key = f"{module}._extra_state/shard_{place}"
        if key not in seen:
            seen.add(key)
            yield key
    for layer in range(architecture.mtp_layers):
        yield f"{_MTP_ATTENTION.format(layer=layer)}._extra_state/shard_0_1"


def empty_extra_state() -> bytes:
    """No FP8 state. One copy serves all keys."""
    buffer = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], buffer)
    return buffer.getvalue()
