"""Decides which tensors of a checkpoint are in block FP8, and names their scales."""

from collections.abc import Mapping
from pathlib import Path

import torch

from converters.architectures import Architecture
from converters.errors import UserError
from converters.fp8.blocks import CODES, scales_shape
from converters.layout import Shape

SCALES_SUFFIX = "_scale_inv"
"""Suffix of the names of scales. Despite "inv", codes are multiplied by them."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16)
_KEPT = ("mlp.router.weight", "eh_proj.weight")
"""Megatron's names of the matrices in a layer that released DeepSeek-V3 and Qwen3 checkpoints keep in bfloat16."""


def quantised_names(architecture: Architecture) -> frozenset[str]:
    """The HuggingFace names of the weights that are in FP8 in released checkpoints.

    These are the matrices of attention, MLPs and experts in all layers, including multi-token prediction. The router,
    the projection into a multi-token-prediction layer, the embedding and the output layer stay unquantised.
    """
    names: set[str] = set()
    for parameter in architecture.weight_map:
        if parameter.megatron.endswith(_KEPT):
            continue
        matrices = [name for name, dimensions in parameter.huggingface if len(dimensions) == 2]
        for layer in parameter.layers:
            for expert in range(architecture.num_experts if parameter.is_expert else 1):
                names.update(name.format(layer=layer, expert=expert) for name in matrices)
    return frozenset(names)


def unquantised_modules(architecture: Architecture) -> list[str]:
    """The modules whose matrices are not in FP8, including the output layer, tied or not."""
    quantised = quantised_names(architecture)
    kept = [name for name, shape in architecture.hf_shapes.items() if len(shape) == 2 and name not in quantised]
    return sorted({"lm_head", *(name.removesuffix(".weight") for name in kept)})


def scales_of(folder: Path, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Map the name of each FP8 tensor in the checkpoint `folder` to the name of its scales.

    Raises UserError for a tensor in another FP8 dtype, that is not a matrix, or that has no scales; also for scales of
    a wrong shape or dtype, and for scales without an FP8 tensor.
    """
    scales = {}
    for name, dtype in dtypes.items():
        if dtype is CODES:
            scales[name] = name + SCALES_SUFFIX
            _check(folder, name, shapes, dtypes)
        elif dtype.itemsize == 1 and dtype.is_floating_point:
            raise UserError(f"{folder} holds {name} in {dtype}; the only FP8 type that is read is {CODES}")
    for name in dtypes:
        if name.endswith(SCALES_SUFFIX) and name.removesuffix(SCALES_SUFFIX) not in scales:
            raise UserError(
                f"{folder} holds the scales {name}, but no tensor {name.removesuffix(SCALES_SUFFIX)} in {CODES}"
            )
    return scales


def _check(folder: Path, name: str, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> None:
    scales = name + SCALES_SUFFIX
    if len(shapes[name]) != 2:
        raise UserError(f"{folder} holds {name} in FP8 with shape {list(shapes[name])}; only matrices can be")
    if scales not in shapes:
        raise UserError(f"{folder} holds {name} in FP8 without its scales {scales}; copy the checkpoint again")
    if dtypes[scales] not in _SCALE_DTYPES or shapes[scales] != scales_shape(shapes[name]):
        raise UserError(
            f"{folder} holds the scales {scales} in {dtypes[scales]} with shape {list(shapes[scales])}, where"
            f" {name} needs {list(scales_shape(shapes[name]))} in {' or '.join(map(str, _SCALE_DTYPES))}"
        )
