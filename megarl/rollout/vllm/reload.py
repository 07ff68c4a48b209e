"""vLLM's own reload of a model: its loaders take whole tensors, and its kernels process them anew.

vLLM 0.32 copies what its kernels make into the parameters and buffers of before, where captured CUDA graphs read. Its
kernels hold other tensors, too, such as locks and scales of experts, and make new ones: graphs would read, and write,
memory that has been freed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

_Path = tuple[Any, ...]

_FOLLOWED = "vllm.model_executor."
"""Modules with the classes that hold tensors of one layer."""
_OF_TORCH = {"_parameters", "_buffers", "_modules"}
"""Fields of a module that vLLM's reload keeps."""


class Reload:
    """One reload; in between, `model.load_weights` is called with all tensors of a checkpoint.

    The first of an engine is kept as long as the engine, for graphs that were captured before: it holds all that
    modules and kernels held then, also objects of other packages.
    """

    def __init__(self, model: nn.Module, config: ModelConfig) -> None:
        self._model, self._config = model, config
        self._before = [
            (module, path, dict(_fields(holder))) for module in model.modules() for path, holder in _holders(module)
        ]
        for module in model.modules():
            _expect_no_scales_of_activations(module)
        initialize_layerwise_reload(model)

    def finish(self) -> None:
        """Process what is left: attention layers, and layers that have padding."""
        finalize_layerwise_reload(self._model, self._config)
        with torch.no_grad():
            for module, path, before in self._before:
                _put_back(module, path, before)


def _expect_no_scales_of_activations(module: nn.Module) -> None:
    """Let experts in NVFP4 be complete without scales of activations in four bits, which no checkpoint of ours has.

    vLLM 0.32 has parameters for them in any case. A layer that waited for them would keep all that is loaded until the
    reload ends: each worker a whole checkpoint.
    """
    method = getattr(module, "quant_method", None)
    if isinstance(method, CompressedTensorsW4A4Nvfp4MoEMethod) and method.use_a16:
        made = LAYERWISE_INFO[module].restore_metadata[0]
        for name in ("w13_input_global_scale", "w2_input_global_scale"):
            made[name].weight_loader_numel = 0


def _holders(module: nn.Module) -> Iterator[tuple[_Path, Any]]:
    """Yield a module, and what it holds that may hold tensors beside parameters and buffers, and where that is."""
    todo: list[tuple[_Path, Any]] = [((), module)]
    seen = set()
    while todo:
        path, holder = todo.pop()
        yield path, holder
        for name, value in _fields(holder).items():
            if id(value) not in seen and _is_followed(value):
                seen.add(id(value))
                todo.append(((*path, name), value))


def _is_followed(value: Any) -> bool:
    if isinstance(value, nn.Module | type):
        return False
    return isinstance(value, dict) or (type(value).__module__.startswith(_FOLLOWED) and hasattr(value, "__dict__"))


def _fields(holder: Any) -> dict[Any, Any]:
    fields = holder if isinstance(holder, dict) else vars(holder)
    if isinstance(holder, nn.Module):
        return {name: value for name, value in fields.items() if name not in _OF_TORCH}
    return fields


def _put_back(module: nn.Module, path: _Path, before: Mapping[Any, Any]) -> None:
    """Give tensors that were held the values of those that have come into their places, and their places."""
    holder: Any = module
    for name in path:
        holder = _fields(holder).get(name)
        if not _is_followed(holder):
            return
    fields = holder if isinstance(holder, dict) else vars(holder)
    for name, kept in before.items():
        made = fields.get(name)
        if isinstance(kept, Tensor) and isinstance(made, Tensor) and made is not kept and _form(made) == _form(kept):
            _written_once(kept).copy_(_written_once(made))
            fields[name] = kept


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _written_once(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that has memory of its own."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
