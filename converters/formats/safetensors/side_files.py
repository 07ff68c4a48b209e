"""Files of a model other than its weights: config.json, tokenizer, chat template, generation config."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from converters.dtypes import dtype_name
from converters.formats.safetensors.header import read_header
from converters.formats.safetensors.reader import CONFIG

_BESIDE_CONFIG = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "*.py",
)
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Fields of a config.json with the weights' dtype: transformers' present name, and the former one."""


def copy_side_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer and all other files of the model `source`, except config.json and the weights."""
    for pattern in _BESIDE_CONFIG:
        for path in source.glob(pattern):
            if path.is_file():
                copy = folder / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` of the same model without quantisation."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """The weights' dtype according to a config.json; None if it does not say.

    Example: stated_dtype({"torch_dtype": "bfloat16"}) is "bfloat16"
    """
    return next((config[key] for key in _DTYPE_KEYS if config.get(key)), None)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`config` of weights in `dtype`."""
    keys = [key for key in _DTYPE_KEYS if key in config] or _DTYPE_KEYS[:1]
    return {**config, **dict.fromkeys(keys, dtype_name(dtype))}


def main_dtype(folder: Path) -> torch.dtype:
    """The dtype of most bytes of the folder's weights."""
    nbytes: Counter[torch.dtype] = Counter()
    for path in folder.glob("*.safetensors"):
        for entry in read_header(path).values():
            nbytes[entry.dtype] += entry.nbytes
    return nbytes.most_common(1)[0][0]
