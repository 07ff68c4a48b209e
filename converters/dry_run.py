"""Plans the output of a conversion from config.json alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from converters.architectures import read_architecture
from converters.dtypes import SHORT_NAMES, dtype_name
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, read_json, stated_dtype
from converters.fp8 import is_block_fp8
from converters.hf_to_megatron import ConversionPlan, DTypeChoice, plan_conversion
from converters.layouts.parallel_sizes import ParallelSizes


def plan_from_config(
    hf_folder: Path,
    parallel: ParallelSizes,
    *,
    dtype: DTypeChoice,
    vocabulary_multiple: int,
    padded_vocabulary: int | None = None,
) -> ConversionPlan:
    """The plan of `convert_checkpoint` for the weights that config.json describes, which need not be there.

    Raises UserError for anything wrong with config.json or the sizes.
    """
    config = read_json(hf_folder / CONFIG)
    architecture = read_architecture(config)
    is_fp8 = is_block_fp8(config)  # refuses other kinds of quantisation
    weights = SHORT_NAMES[dtype] if dtype != "keep" else torch.bfloat16 if is_fp8 else _own_dtype(config)
    return plan_conversion(
        architecture,
        parallel,
        architecture.hf_dtypes(weights),
        vocabulary_multiple=vocabulary_multiple,
        padded_vocabulary=padded_vocabulary,
    )


def _own_dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = stated_dtype(config) or "bfloat16"
    known = {dtype_name(dtype): dtype for dtype in SHORT_NAMES.values()}
    if name not in known:
        raise UserError(f"config.json says that its weights are in {name!r}; say --dtype bf16 or fp32")
    return known[name]
