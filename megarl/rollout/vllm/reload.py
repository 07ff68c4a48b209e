"""vLLM's own reload of a model: its loaders get whole tensors, and its kernels process them again.

vLLM 0.32 copies the results into the previous parameters and buffers, which captured CUDA graphs read. But its kernels
also hold other tensors, such as locks and scales of experts, and create new ones: graphs would read and write freed
memory.
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
"""Prefix of the modules whose classes hold tensors of a layer."""
_OF_TORCH = {"_parameters", "_buffers", "_modules"}
"""Fields of a module that vLLM's reload handles itself."""


class Reload:
    """One reload; before `finish`, `model.load_weights` must be called with all tensors of a checkpoint.

    The first reload of an engine is kept for the engine's lifetime, for graphs captured before it: it holds everything
    that modules and kernels held then, including objects of other packages.
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
        """Process the remaining layers: attention, and layers with padding."""
        finalize_layerwise_reload(self._model, self._config)
        with torch.no_grad():
            for module, path, before in self._before:
                _put_back(module, path, before)


def _expect_no_scales_of_activations(module: nn.Module) -> None:
    """Let NVFP4 experts be complete without scales of four-bit activations, which megarl's checkpoints lack.

    vLLM 0.32 has parameters for them in any case. A layer waiting for them would keep all its loaded tensors until the
    reload ends, so each worker would hold a whole checkpoint.
    """
    method = getattr(module, "quant_method", None)
    if isinstance(method, CompressedTensorsW4A4Nvfp4MoEMethod) and method.use_a16:
        made = LAYERWISE_INFO[module].restore_metadata[0]
        for name in ("w13_input_global_scale", "w2_input_global_scale"):
            made[name].weight_loader_numel = 0


def _holders(module: nn.Module) -> Iterator[tuple[_Path, Any]]:
    """Yield a module, and the objects in it that may hold tensors besides parameters and buffers, with their paths."""
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
    """Copy the values of new tensors into the ones held before, and put those back in place."""
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
    """The part of an expanded tensor that has its own memory."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
