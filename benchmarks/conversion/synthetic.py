"""Synthetic checkpoints of any size in HuggingFace form, with random values, written without a model.

    python -m benchmarks.conversion.synthetic --size-gb 1.2 --out DIR [--shape narrow] [--fp8]

They are small DeepSeek-V3s (arXiv 2412.19437), with 8 experts instead of 256 and its multi-token-prediction layer, in
one of two shapes: "shallow" has as many layers as fit the size, with tensors of about 2 MB on average; "narrow" has all
61 layers at any size, in about 2,300 small tensors. `--fp8` writes the same model as released: e4m3 codes with a scale
for every 128x128 block. Only one file's tensors are in memory at a time.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from converters.architectures import Architecture, read_architecture
from converters.layout import Shape

FP8_BLOCK = (128, 128)
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(FP8_BLOCK),
}
DEEPSEEK_V3: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
"""The released config.json of the model with 671 billion parameters, without its quantization_config."""
MIN_FILES = 8
_MAX_FILE_BYTES = 256_000_000
_WIDTH_STEP = 128
_EXPERT_WIDTH_STEP = 32
_VOCABULARY = 8192
_SHALLOW_HIDDEN, _SHALLOW_EXPERT_WIDTH = 1024, 704
_FP8_NAN = 0x7F


def shallow_config(size_bytes: int) -> dict[str, Any]:
    """The config.json of a shallow DeepSeek-V3 whose tensors have about `size_bytes` in bf16.

    Layers are added while they fit, then vocabulary. There are at least a dense first layer and one MoE layer, as which
    the multi-token-prediction layer is built.
    """
    layers = 2
    while _size_bytes(_shallow(layers + 1, _VOCABULARY)) <= size_bytes:
        layers += 1
    config = _shallow(layers, _VOCABULARY)
    word_bytes = _size_bytes(_shallow(layers, _VOCABULARY + 1)) - _size_bytes(config)
    return _shallow(layers, _VOCABULARY + max(0, size_bytes - _size_bytes(config)) // word_bytes)


def _shallow(layers: int, vocabulary: int) -> dict[str, Any]:
    return {
        **_small(_SHALLOW_HIDDEN, _SHALLOW_EXPERT_WIDTH),
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
    }


def narrow_config(size_bytes: int) -> dict[str, Any]:
    """The config.json of a narrow 61-layer DeepSeek-V3 whose tensors have about `size_bytes` in bf16.

    The width of the experts approximates the size in steps of 32, at a hidden size about three times as wide.
    """
    hidden = _WIDTH_STEP
    while _size_bytes(_small(hidden + _WIDTH_STEP, (hidden + _WIDTH_STEP) // 3)) <= size_bytes:
        hidden += _WIDTH_STEP
    widths = range(_EXPERT_WIDTH_STEP, 2 * hidden, _EXPERT_WIDTH_STEP)
    return min((_small(hidden, width) for width in widths), key=lambda config: abs(_size_bytes(config) - size_bytes))


SHAPES: Mapping[str, Callable[[int], dict[str, Any]]] = {"shallow": shallow_config, "narrow": narrow_config}
"""Functions that make a config.json for a size in bytes."""


def _small(hidden: int, expert_width: int) -> dict[str, Any]:
    return {
        **DEEPSEEK_V3,
        "hidden_size": hidden,
        "intermediate_size": 5 * hidden // 2,
        "moe_intermediate_size": expert_width,
        "vocab_size": _VOCABULARY,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "q_lora_rank": hidden // 4,
        "kv_lora_rank": hidden // 8,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
    }


def _size_bytes(config: Mapping[str, Any]) -> int:
    architecture = read_architecture(config)
    dtypes = architecture.hf_dtypes(torch.bfloat16)
    shapes = architecture.hf_shapes
    stored = [*shapes, *architecture.hf_copies.values()]
    return sum(math.prod(shapes[name]) * dtypes[name].itemsize for name in stored)


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file: its values are drawn from `seed`, so that copies are equal."""

    shape: Shape
    dtype: torch.dtype
    seed: int
    mean: float = 0.0
    std: float = 0.02

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def draw(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.dtype is torch.float8_e4m3fn:
            # Every code except the two NaNs.
            magnitude = torch.randint(0, _FP8_NAN, self.shape, generator=generator, dtype=torch.uint8)
            sign = torch.randint(0, 2, self.shape, generator=generator, dtype=torch.uint8)
            return (magnitude | sign << 7).view(torch.float8_e4m3fn)
        return torch.empty(self.shape, dtype=self.dtype).normal_(self.mean, self.std, generator=generator)


def write_checkpoint(config: Mapping[str, Any], folder: Path, *, fp8: bool = False, seed: int = 0) -> int:
    """Write a checkpoint of `config` to the new folder `folder`: weights, index, config.json and a tokenizer.

    Matrices are in bf16; with `fp8` those of the layers' linear modules are in block FP8. The same arguments give the
    same bytes. Returns the bytes of its tensors; raises FileExistsError if `folder` exists.
    """
    folder.mkdir(parents=True)
    stored = dict(_stored_tensors(read_architecture(config), fp8=fp8, seed=seed))
    total = sum(tensor.nbytes for tensor in stored.values())
    files = _cut_into_files(stored, min(_MAX_FILE_BYTES, total // MIN_FILES + 1), config["num_hidden_layers"])
    index: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file_name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file({name: stored[name].draw() for name in names}, folder / file_name, metadata={"format": "pt"})
        index.update(dict.fromkeys(names, file_name))
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _write_json(folder / "config.json", {**config, **({"quantization_config": QUANTIZATION_CONFIG} if fp8 else {})})
    words = {f"word{i}": i for i in range(config["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return total


def _stored_tensors(architecture: Architecture, *, fp8: bool, seed: int) -> Iterator[tuple[str, _Stored]]:
    dtypes = architecture.hf_dtypes(torch.bfloat16)
    originals = {**{name: name for name in architecture.hf_shapes}, **architecture.hf_copies}
    seeds = {name: seed * len(originals) + number for number, name in enumerate(architecture.hf_shapes)}
    for name, original in originals.items():
        shape, dtype = architecture.hf_shapes[original], dtypes[original]
        if fp8 and _is_quantised(name):
            yield name, _Stored(shape, torch.float8_e4m3fn, seeds[original])
            blocks = tuple(-(-length // block) for length, block in zip(shape, FP8_BLOCK, strict=True))
            # The mean of a block's largest weight, divided by the largest code.
            yield f"{name}_scale_inv", _Stored(blocks, torch.float32, seeds[original], mean=2e-4, std=2e-5)
        elif "norm" in name:
            yield name, _Stored(shape, dtype, seeds[original], mean=1.0, std=0.1)
        else:
            yield name, _Stored(shape, dtype, seeds[original])


def _is_quantised(name: str) -> bool:
    # Released checkpoints keep the projection of a multi-token-prediction layer in bf16.
    return "_proj" in name and name.endswith(".weight") and "eh_proj" not in name


def _cut_into_files(stored: Mapping[str, _Stored], max_bytes: int, num_layers: int) -> list[list[str]]:
    """Names by file, in order. As in the released checkpoint, multi-token prediction has separate files."""
    predictions = {
        name for name in stored if name.startswith("model.layers.") and int(name.split(".")[2]) >= num_layers
    }
    files: list[list[str]] = []
    for part in (stored.keys() - predictions, predictions):
        room = 0
        for name in (name for name in stored if name in part):
            if stored[name].nbytes > room:
                files.append([])
                room = max_bytes
            files[-1].append(name)
            room -= stored[name].nbytes
    return files


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Write one checkpoint; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, required=True, help="size of the bf16 form, in 10^9 bytes")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--shape", choices=SHAPES, default="shallow", help="layers or widths follow the size")
    parser.add_argument("--fp8", action="store_true", help="write the block-FP8 form, about half as large")
    options = parser.parse_args()
    config = SHAPES[options.shape](int(options.size_gb * 1e9))
    total = write_checkpoint(config, options.out, fp8=options.fp8)
    print(f"{options.out}: {total / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
