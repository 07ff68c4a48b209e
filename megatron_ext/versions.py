"""Differences between megatron-core 0.16 and 0.19, one function each. Tests of models fail without them.

`install` applies those that replace something inside megatron-core 0.19; the others are called where they are needed.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from packaging.version import Version
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from converters.formats.torch_dist import COMMON
from megatron_ext import device

IS_0_19 = Version(megatron.core.__version__) >= Version("0.19")
if IS_0_19:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    SaveStrategy = TorchDistSaveShardedStrategy
else:
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy

    SaveStrategy = AsyncSaveShardedStrategy

_IN_MODULES, _IN_FILES = "mtp_model_layer", "transformer_layer"


def install() -> None:
    """Apply the replacements; idempotent."""
    if not IS_0_19:
        tell_of_a_disk_without_room_for_common_state()
        return
    find_prediction_layers_by_their_former_name()
    leave_query_projections_without_norm()
    if not device.has_transformer_engine():
        let_selective_recompute_go_without_a_compiler()


def tell_of_a_disk_without_room_for_common_state() -> None:
    """Let 0.16 write `common.pt` through a file of Python, whose OSError says what is wrong with the disk.

    By its name, torch writes it itself, and a full disk is a RuntimeError: `unexpected pos 64 vs 0`. 0.19 has no such
    file.
    """

    def save_common(_self: Any, common_state: dict[str, Any], folder: str | Path) -> None:
        if dist.get_rank() == 0:
            with (Path(folder) / COMMON).open("wb") as file:
                torch.save(common_state, file)

    TorchCommonSaveStrategy.save_common = save_common


def find_prediction_layers_by_their_former_name() -> None:
    """0.19 calls the layer inside a multi-token-prediction layer `mtp_model_layer`, but `transformer_layer` in files.

    This lets it find the layer under the name from `name_prediction_layers_as_in_files`, which layouts also use.
    """
    MultiTokenPredictionLayer.mtp_model_layer = property(
        lambda layer: layer._modules.get(_IN_FILES) or layer._modules[_IN_MODULES]
    )


def name_prediction_layers_as_in_files(chunks: Sequence[torch.nn.Module]) -> None:
    """Give multi-token-prediction layers the names that they have in 0.16; call before anything reads names."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, MultiTokenPredictionLayer) and _IN_MODULES in module._modules:
            module._modules[_IN_FILES] = module._modules.pop(_IN_MODULES)


def prediction_inputs(tokens: Tensor, positions: Tensor, embedded: Tensor, hidden: Tensor) -> tuple[Tensor | None, ...]:
    """The inputs of a multi-token-prediction layer; in 0.19 they include a padding mask, which is None here."""
    return (tokens, positions, None, embedded, hidden) if IS_0_19 else (tokens, positions, embedded, hidden)


def leave_query_projections_without_norm() -> None:
    """0.19 adds a norm before a query projection without low rank if latent attention has a norm of keys and values.

    DeepSeek-V2-Lite and Moonlight only have the norm of keys and values, as 0.16 builds it.
    """
    if hasattr(QKNormConfigResolver._mla_fused_linear_or_default, "original"):
        return
    original = QKNormConfigResolver._mla_fused_linear_or_default

    def linear(self: Any, spec: Any, name: str) -> Any:
        return spec if name == "linear_q_proj" else original(self, spec, name)

    linear.original = original  # type: ignore[attr-defined]
    QKNormConfigResolver._mla_fused_linear_or_default = linear


def let_selective_recompute_go_without_a_compiler() -> None:
    """For selective recompute, 0.19 compiles C++ on first use, which makes an output share the recomputed one's memory.

    On a CPU this takes most of a minute on each new machine, and needs a compiler. Copy instead, as 0.16 does.
    """
    tensor_parallel_random._get_share_storage = lambda: _copy_storage


def _copy_storage(destination: Tensor, source: Tensor) -> None:
    to, of = destination.untyped_storage(), source.untyped_storage()
    to.resize_(of.nbytes())
    to.copy_(of)


def module_of(spec: ModuleSpec | functools.partial) -> Any:
    """The module class of `spec`: a ModuleSpec or, for an MLP in 0.19, a partial of the class."""
    return spec.func if isinstance(spec, functools.partial) else spec.module


def with_submodules(spec: Any, **submodules: Any) -> Any:
    """`spec`, of either kind that `module_of` accepts, with some of its submodules replaced."""
    if isinstance(spec, functools.partial):
        return functools.partial(spec, submodules=replace(spec.keywords["submodules"], **submodules))
    return replace(spec, submodules=replace(spec.submodules, **submodules))


def load_checkpoint(
    wanted: dict[str, Any], folder: Path, load_common: Callable[[str | Path], dict[str, Any]]
) -> dict[str, Any]:
    """`dist_checkpointing.load`, with `load_common` for everything that is not a tensor.

    0.16 accepts a strategy for that. 0.19 uses a function of its own, which may run code from the checkpoint, and its
    ranks read independently: here a failure of one is raised on all ranks, as 0.16 does.
    """
    if not IS_0_19:
        strategy = TorchCommonLoadStrategy()
        strategy.load_common = load_common
        return dist_checkpointing.load(wanted, str(folder), common_strategy=strategy)
    state, failure = {}, None
    with mock.patch.object(serialization, "load_common_state_dict", load_common):
        try:
            state = dist_checkpointing.load(wanted, str(folder))
        except CheckpointException as error:
            failure = error
    of_ranks: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, [] if failure is None else list(failure.failures.values()))
    failures = {rank: failed[0] for rank, failed in enumerate(of_ranks) if failed}
    if failures:
        raise CheckpointException(f"ranks failed to read {folder}", failures)
    return state
