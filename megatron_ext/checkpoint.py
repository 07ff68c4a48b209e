"""The state of a training run in Megatron's distributed format (torch_dist).

The weights in it can be read at any layout. A run continues with the ranks and sizes it was saved with: the random
number generators are kept per rank.
"""

import pickle
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from converters.errors import UserError
from converters.formats.torch_dist import COMMON
from megatron_ext import checkpoint_folder, compat, device
from megatron_ext.intact import require_intact
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.reference import ReferenceWeights

_REFERENCE = "reference."


def save(engine: MegatronModel, folder: Path) -> None:
    """Collective: write this rank's part of the model, optimizer, schedule and RNG to `folder`.

    Also the weights of the reference model, if they are no longer those that the model began with, and a list of what
    was written with its checksums, for the manifest.

    Raises UserError on every rank, before a byte is written, if the disk has no room for all parts.
    """
    engine.residence.require("weights", "training")
    # A policy that waits for its critic has made no step yet.
    compat.prime_optimizer_state(engine.optimizer)
    engine.complete_weights()
    state = _sharded_state(engine, is_loading=False)
    if engine.reference is not None and engine.reference.refreshed:
        state |= _sharded_reference(engine, engine.reference)
    _check_room(state, folder)
    with compat.checksums_of_writes() as written:
        dist_checkpointing.save(state, str(folder))
    if torch.distributed.get_rank() == 0:
        checkpoint_folder.list_written(folder, written)


def load(engine: MegatronModel, folder: Path) -> None:
    """Collective: continue from the checkpoint `folder`; `engine.prepare_training` has been called.

    The reference model, where the engine keeps one, becomes that of the checkpoint, if it holds one.

    Raises UserError on every rank, before anything of it is taken over, if the checkpoint is damaged.
    """
    engine.residence.require("weights", "training")
    require_intact(folder, weights_only=False)
    compat.prime_optimizer_state(engine.optimizer)
    wanted = _sharded_state(engine, is_loading=True)
    reference = engine.reference if _holds_reference(folder) else None
    if reference is not None:
        wanted |= _sharded_reference(engine, reference)
    with compat.user_error_of_any_rank():
        state = dist_checkpointing.load(wanted, str(folder), common_strategy=_Common())
    if reference is not None:
        reference.refresh(_loaded_reference(engine, state))
    for name, chunk in _named_chunks(engine).items():
        chunk.load_state_dict(state[name])
    rates = [(group["max_lr"], group["min_lr"]) for group in engine.optimizer.param_groups]
    engine.optimizer.load_state_dict(state["optimizer"])
    compat.separate_step_counters(engine.optimizer)
    # As in the schedule, the rates are those of the configuration.
    for group, (highest, lowest) in zip(engine.optimizer.param_groups, rates, strict=True):
        group |= {"max_lr": highest, "min_lr": lowest}
    engine.scheduler.load_state_dict(state["scheduler"])
    _set_rng_state(state["rng_state"])
    engine.residence.count()


class _Common(TorchCommonLoadStrategy):
    """Reads `common.pt`, of which torch loads plain values only."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        path = Path(checkpoint_dir) / COMMON
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise UserError(f"{path} is missing, damaged or no plain values; copy the checkpoint again") from error


def _check_room(state: Mapping[str, Any], folder: Path) -> None:
    # Megatron's writers report a full disk as an inconsistent file position, with the reason lost.
    parts = (part for part in nested_values(state) if isinstance(part, ShardedTensor | ShardedTensorFactory))
    own = sum(part.data.nbytes for part in parts if is_main_replica(part.replica_id))
    needed = torch.tensor([own], dtype=torch.int64, device=device.device())
    torch.distributed.all_reduce(needed)
    if int(needed) > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"cannot write a checkpoint of {int(needed):,} bytes to {folder.parent}: the disk has {free:,} bytes free; "
            "make room or choose another output_dir (the last complete checkpoint is untouched)"
        )


def _named_chunks(engine: MegatronModel) -> dict[str, GPTModel]:
    bare = [chunk.module for chunk in engine.chunks]
    return {"model": bare[0]} if len(bare) == 1 else {f"model{i}": chunk for i, chunk in enumerate(bare)}


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        # Data-parallel rank 0, which writes it, gathers the optimizer's state over gloo in host memory. Otherwise all
        # ranks would, on their GPUs: whole buffers, twice, beside everything else.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(engine: MegatronModel, *, is_loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(engine).items()
    }
    state["optimizer"] = engine.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    state["scheduler"] = engine.scheduler.state_dict()
    state["rng_state"] = ShardedObject(
        "rng_state", _rng_state(), (torch.distributed.get_world_size(),), (torch.distributed.get_rank(),)
    )
    return state


def _sharded_reference(engine: MegatronModel, reference: ReferenceWeights) -> dict[str, Any]:
    """The parts of the model's state with the tensors of the reference, under keys of their own."""
    state: dict[str, Any] = {}
    chunks = _named_chunks(engine)
    for name, chunk in chunks.items():
        prefix = f"{name}." if len(chunks) > 1 else ""
        state[_REFERENCE + name] = {
            key: replace(part, key=_REFERENCE + part.key, data=reference.tensors[prefix + key])
            for key, part in chunk.sharded_state_dict(metadata=_metadata()).items()
            # The rest is no weights.
            if prefix + key in reference.tensors
        }
    return state


def _loaded_reference(engine: MegatronModel, state: Mapping[str, Any]) -> dict[str, Tensor]:
    chunks = _named_chunks(engine)
    return {
        f"{name}.{key}" if len(chunks) > 1 else key: tensor
        for name in chunks
        for key, tensor in state[_REFERENCE + name].items()
    }


def _holds_reference(folder: Path) -> bool:
    return any(key.startswith(_REFERENCE) for key in dist_checkpointing.load_tensors_metadata(str(folder)))


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
