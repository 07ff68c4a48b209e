"""Transformer Engine's modules without their kernels: only parameters, with the same names and shapes.

The peers build a GPTModel from Transformer Engine's specs before they load or export anything, and Transformer Engine
needs a GPU. Here they only copy weights, so no module of this file is ever called.
"""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn import Module, Parameter

VERSION = "1.12.0"
"""The version that megatron-core sees: before 1.13 it requests none of the fused operations."""


_NO_STATE = torch.empty(0, dtype=torch.uint8)


class _WithExtraState(Module):
    """Has extra state, as Transformer Engine stores the state of its FP8 recipe (here none) with the parameters."""

    def get_extra_state(self) -> torch.Tensor:
        return _NO_STATE

    def set_extra_state(self, state: torch.Tensor) -> None: ...


def _parameter(*shape: int, dtype: torch.dtype, cut: int | None = None) -> Parameter:
    parameter = Parameter(torch.empty(shape, dtype=dtype))
    if cut is not None:
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, cut, 1  # type: ignore[attr-defined]
    return parameter


class RMSNorm(_WithExtraState):
    def __init__(self, hidden_size: int, *, params_dtype: torch.dtype, **_options: Any) -> None:
        super().__init__()
        self.weight = _parameter(hidden_size, dtype=params_dtype)


_CUT_DIMENSION = {"column": 0, "row": 1, None: None}


class Linear(_WithExtraState):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        params_dtype: torch.dtype,
        bias: bool,
        parallel_mode: str | None = None,
        **_options: Any,
    ) -> None:
        if bias:
            raise NotImplementedError("linear modules with a bias")
        super().__init__()
        self.parallel_mode = parallel_mode
        self.weight = _parameter(out_features, in_features, dtype=params_dtype, cut=_CUT_DIMENSION[parallel_mode])


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, params_dtype: torch.dtype, **options: Any) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **options)
        self.layer_norm_weight = _parameter(in_features, dtype=params_dtype)


class GroupedLinear(_WithExtraState):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        params_dtype: torch.dtype,
        parallel_mode: str,
        **_options: Any,
    ) -> None:
        super().__init__()
        for number in range(num_gemms):
            weight = _parameter(out_features, in_features, dtype=params_dtype, cut=_CUT_DIMENSION[parallel_mode])
            self.register_parameter(f"weight{number}", weight)


class DotProductAttention(_WithExtraState):
    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        super().__init__()


class _Permissive(ModuleType):
    """A module from which anything can be imported; missing names are empty classes."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (Module,), {}))
        return getattr(self, name)


class _Finder(MetaPathFinder, Loader):
    """Finds `transformer_engine` and everything below it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "transformer_engine" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Permissive(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_CONTENTS.get(module.__name__, {}))


_LAYERS = (RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention)
_CONTENTS: Mapping[str, Mapping[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    # Every TransformerBlock creates one.
    "transformer_engine.pytorch.cpu_offload": {"get_cpu_offload_context": lambda *_, **__: (nullcontext(), None)},
    "transformer_engine.pytorch": {layer.__name__: layer for layer in _LAYERS},
}
_IMPORTED_WITH_THE_PACKAGE = (
    "transformer_engine.common.recipe",
    "transformer_engine.pytorch.distributed",
    "transformer_engine.pytorch.ops",
)


def install() -> None:
    """Make `import transformer_engine` find these modules. Raises RuntimeError if megatron was already imported."""
    if "megatron.core" in sys.modules:
        raise RuntimeError("Transformer Engine's names must be there before the first import of megatron")
    sys.meta_path.insert(0, _Finder())
    for name in _IMPORTED_WITH_THE_PACKAGE:
        import_module(name)
