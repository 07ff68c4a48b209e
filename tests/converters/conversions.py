"""Small checkpoints of every family with random bits, and conversions of them."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small_configs import CONFIGS

from converters.architectures import Architecture, read_architecture
from converters.hf_to_megatron import ConversionPlan, convert_checkpoint
from converters.layouts.megatron import ParallelSizes
from converters.megatron_to_hf import ExportPlan, export_checkpoint

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
_DEEPSEEK_V2 = {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "greedy"}
_MOONLIGHT = {"q_lora_rank": None, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1, "rope_scaling": None}
_GEMMA2 = {
    "model_type": "gemma2",
    "head_dim": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 4,
    "sliding_window": 8,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    **CONFIGS,
    "gemma2": {**CONFIGS["qwen2"], **_GEMMA2},
    "deepseek_v2": {**CONFIGS["deepseek_v3"], **_DEEPSEEK_V2, "norm_topk_prob": False, "num_nextn_predict_layers": 0},
    "kimi_k2": {**CONFIGS["deepseek_v3"], "model_type": "kimi_k2", "num_nextn_predict_layers": 0},
    "moonlight": {**CONFIGS["deepseek_v3"], **_MOONLIGHT},
    "qwen3_tied": {**CONFIGS["qwen3"], "tie_word_embeddings": True},
    "qwen3_first_layer_dense": {**CONFIGS["qwen3_moe"], "mlp_only_layers": [0]},
    "deepseek_v3_two_mtp": {**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 2},
    "deepseek_v3_tied": {**CONFIGS["deepseek_v3"], "tie_word_embeddings": True},
}

Content = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    return read_architecture(config)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A tensor that may hold anything: NaNs of any payload, infinities, subnormal numbers, zeros of either sign."""
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def random_numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def random_tensors(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype = BF16,
    draw: Callable[..., torch.Tensor] = random_bits,
    dtypes: Mapping[str, torch.dtype] | None = None,
    copies: tuple[str, ...] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a model; `copies` of its tied or shared weights, by default those of released checkpoints."""
    architecture = read_architecture(config)
    generator = torch.Generator().manual_seed(5)
    types = {**architecture.hf_dtypes(dtype), **(dtypes or {})}
    originals = set(architecture.hf_copies.values())
    tensors = {
        # A copy has to be equal to its original, and NaN is not.
        name: (random_numbers if name in originals else draw)(shape, types[name], generator)
        for name, shape in architecture.hf_shapes.items()
    }
    for name in architecture.exported_copies if copies is None else copies:
        tensors[name] = tensors[architecture.hf_copies[name]].clone()
    return tensors


def write_model(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], files: int = 1) -> Path:
    """A HuggingFace folder, written by the reference library."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    index = {}
    for number in range(files):
        file_name = f"model-{number}.safetensors"
        part = names[number::files]
        save_file({name: tensors[name] for name in part}, folder / file_name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def make(folder: Path, name: str, **options: Any) -> Path:
    return write_model(folder, MODELS[name], random_tensors(MODELS[name], **options))


def no_progress(_done: int, _total: int) -> None:
    pass


def convert(source: Path, target: Path, sizes: ParallelSizes | None = None, **options: Any) -> ConversionPlan:
    arguments = {"dtype": "keep", "vocabulary_multiple": 1, "workers": 1, "progress": no_progress, **options}
    return convert_checkpoint(source, target, sizes or ParallelSizes(), **arguments)


def export(source: Path, target: Path, **options: Any) -> ExportPlan:
    arguments = {
        "hf_config_folder": None,
        "fp8": False,
        "shard_size_bytes": 2**40,
        "workers": 1,
        "progress": no_progress,
    }
    return export_checkpoint(source, target, **{**arguments, **options})


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def content_of(folder: Path) -> Content:
    """Type, shape and bytes of every tensor of a HuggingFace folder, read by the reference library."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found = load_file(path)
        assert not found.keys() & tensors.keys()
        tensors |= found
    return contents(tensors)


def contents(tensors: Mapping[str, torch.Tensor]) -> Content:
    return {name: (each.dtype, tuple(each.shape), raw(each)) for name, each in tensors.items()}


def everything_in(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, with the files' content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
