"""The state of a training run in Megatron's distributed format (torch_dist), written and read by all ranks.

Everything, including the optimizer's state, can be read at any layout and number of ranks. Random number generators,
which only dropout depends on, continue if the layout is the same, and start over otherwise. If adapters are trained,
the checkpoint has only them and their adapter_config.json, as the base weights do not change.
"""

import argparse
import io
import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.models.gpt import GPTModel

from converters.errors import UserError
from converters.formats.torch_dist import COMMON, StoredObject, TorchDistCheckpoint, unwrapped
from converters.gc_pause import gc_paused
from megatron_ext import compat, device, versions
from megatron_ext.checkpoint import fp8_statistics
from megatron_ext.checkpoint.checkpoint_fit import require_fit
from megatron_ext.checkpoint.checkpoint_state import (
    REFERENCE,
    layout,
    loaded_reference,
    megatron_lm_state,
    named_chunks,
    set_rng_state,
    sharded_model,
    sharded_reference,
    sharded_rng_state,
    weight_parts,
)
from megatron_ext.checkpoint.checkpoint_writer import PendingSave, Plan
from megatron_ext.checkpoint.intact import require_intact
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.memory.host_copies import HostCopies
from megatron_ext.optimizer.fully_sharded import is_cut
from megatron_ext.optimizer.optimizer_shards import FORMAT, main_states, sharded_states, take_over

_Part: TypeAlias = tuple[Any, ...]
"""Everything about a saved part of the state except its values: the plan depends only on this."""
_OPTIMIZER, _SCHEDULER = "optimizer", "opt_param_scheduler"  # Megatron-LM's names
_TENSORS, _RNG, _LAYOUT = "optimizer_tensors", "rng_state", "layout"


@dataclass(frozen=True)
class _Planned:
    """The parts of the last saved state, and everything derived from them."""

    parts: list[_Part]
    own_bytes: int
    plan: Plan


class Saving:
    """Saves a model, one checkpoint at a time: `begin`, then `finish`; the run may go on in between."""

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._copies = HostCopies()
        self._pending: PendingSave | None = None
        self._planned: _Planned | None = None

    def begin(self, folder: Path, *, in_background: bool) -> None:
        """Collective: begin to write this rank's part of the model, optimizer, schedule and RNG to `folder`.

        Also the weights of the reference model, if they are no longer those that the model began with, and a list of
        what was written with its checksums, for the manifest. With `in_background` a snapshot is written: the state is
        copied to the host, and the model waits for that before it changes it. Otherwise nothing may change before
        `finish`.

        Raises UserError on every rank, before a byte is written, if the disk has no room for all parts.
        """
        if self._pending is not None:
            raise RuntimeError("the save before this one is not finished")
        # Creating lists of all tensors would trigger full garbage collections.
        with gc_paused():
            state = _state(self._model)
            parts, last = _parts(state), self._planned
            is_known = last is not None and last.parts == parts
            own_bytes = last.own_bytes if last is not None and is_known else _own_bytes(state)
            is_known_to_all = _agree(own_bytes, folder, is_known=is_known)
            plan = last.plan if last is not None and is_known_to_all else None
            self._pending = PendingSave(state, folder, self._copies if in_background else None, plan)
            self._planned = _Planned(parts, own_bytes, self._pending.plan)
        if in_background:
            self._model.lend_state(self._pending.wait_until_copied)
        if self._model.adapters is not None and torch.distributed.get_rank() == 0:
            self._model.adapters.write_config(folder)

    def is_written(self) -> bool:
        """Whether this rank has written its part. Raises the error of a failed write, as `disk_error` for the disk."""
        return self._pending is None or self._pending.is_written()

    def wait_until_written(self) -> float:
        """Wait until this rank has written its part, without a limit; return the seconds since `begin`.

        Raises as `is_written`.
        """
        return 0.0 if self._pending is None else self._pending.wait_until_written()

    def finish(self) -> None:
        """Collective: wait until everything is written and the folder is complete. Raises as `is_written`.

        Waiting is subject to the timeout of collectives, so with slow disks call `wait_until_written` first, on all
        ranks.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            with gc_paused():
                pending.finish()


def save(model: MegatronModel, folder: Path) -> None:
    """Collective: write a checkpoint, and wait for it. See `Saving`."""
    saving = Saving(model)
    saving.begin(folder, in_background=False)
    saving.finish()


def load(model: MegatronModel, folder: Path) -> None:
    """Collective: continue from the checkpoint `folder`; `model.prepare_training` has been called.

    A model with a reference model gets the checkpoint's, if the checkpoint holds a reference model.

    Raises UserError on every rank, before anything is changed, if the checkpoint is damaged, or of another model,
    number format or optimizer.
    """
    model.residence.require("weights", "training")
    require_intact(folder, weights_only=False)
    stored = TorchDistCheckpoint(folder)
    compat.prime_optimizer_state(model.optimizer)
    weights, states = sharded_model(model), main_states(model.optimizer)
    if not fp8_statistics.are_kept(model.chunks[0].config):
        weights = {name: fp8_statistics.without_statistics(parts) for name, parts in weights.items()}
    wanted: dict[str, Any] = {**weights, _TENSORS: _numbered(sharded_states(states, weight_parts(model, weights)))}
    if _load_common(stored).get(_LAYOUT) == layout(model.options.parallel):
        wanted[_RNG] = sharded_rng_state()
    reference = model.reference if _holds_reference(stored) else None
    if reference is not None:
        wanted |= sharded_reference(model, reference)
    require_fit(wanted, stored, model.architecture.gpt_model["vocab_size"])
    with compat.user_error_of_any_rank():
        # Weights and optimizer state are read in place, into the tensors that hold them.
        state = versions.load_checkpoint(wanted, folder, lambda _folder: _load_common(stored))
    if reference is not None:
        reference.refresh(loaded_reference(model, reference, state))
    for name, chunk in named_chunks(model).items():
        _take_weights(chunk, state[name], is_partial=model.adapters is not None)
    take_over(states)
    # Rates and weight decay follow from the configuration and the position in the schedule.
    model.scheduler.load_state_dict(state[_SCHEDULER])
    compat.set_steps(model.optimizer, model.scheduler.num_steps)
    if _RNG in wanted:
        set_rng_state(state[_RNG])
    model.residence.count()


def _take_weights(chunk: GPTModel, loaded: Mapping[str, Any], *, is_partial: bool) -> None:
    """Load the state into `chunk`, except rows of parameters, which were read in place."""
    cut = any(map(is_cut, chunk.parameters()))
    values = {name: loaded[name] for name, _ in chunk.named_buffers() if name in loaded} if cut else loaded
    different = chunk.load_state_dict(fp8_statistics.repickled(values, chunk.config), strict=False)
    if different.unexpected_keys:
        raise ValueError(f"the model has no {different.unexpected_keys[0]}")
    missing = [key for key in different.missing_keys if fp8_statistics.EXTRA_STATE not in key]
    if missing and not cut and not is_partial:
        raise ValueError(f"megatron-core loads no {missing[0]}, one of {len(missing)} tensors")


def _load_common(stored: TorchDistCheckpoint) -> dict[str, Any]:
    """The content other than tensors; torch may load only plain values and argparse.Namespace from it."""
    place = stored.common_place or StoredObject(COMMON, 0, 0)
    path = stored.folder / place.file
    try:
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
            file.seek(place.offset)
            return unwrapped(torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True))
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"{path} is missing, damaged or no plain values; copy the checkpoint again") from error


def _state(model: MegatronModel) -> dict[str, Any]:
    model.residence.require("weights", "training")
    # A policy still waiting for its critic has not made a step yet.
    compat.prime_optimizer_state(model.optimizer)
    model.complete_weights()
    weights = sharded_model(model)
    state: dict[str, Any] = {
        **megatron_lm_state(model),
        **weights,
        _OPTIMIZER: _parameter_groups(model),
        _TENSORS: _numbered(sharded_states(main_states(model.optimizer), weight_parts(model, weights))),
        _SCHEDULER: model.scheduler.state_dict(),
        _RNG: sharded_rng_state(),
        _LAYOUT: layout(model.options.parallel),
    }
    if model.reference is not None and model.reference.refreshed:
        state |= sharded_reference(model, model.reference)
    return state


def _parameter_groups(model: MegatronModel) -> dict[Any, Any]:
    """Parameter groups, as megatron-core's own optimizers expect; here they follow from the configuration."""
    of_parts = [
        {
            "optimizer": {
                "param_groups": [
                    {name: value for name, value in group.items() if name != "params" and not isinstance(value, type)}
                    | {"step": model.scheduler.num_steps}
                    for group in part.optimizer.param_groups
                ]
            },
            "param_state_sharding_type": FORMAT,
        }
        for part in compat.parts(model.optimizer)
    ]
    return of_parts[0] if len(of_parts) == 1 else dict(enumerate(of_parts))


def _numbered(shards: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
    return {str(number): shard for number, shard in enumerate(shards)}


def _parts(state: Mapping[str, Any]) -> list[_Part]:
    return [_part(value) for value in nested_values(state) if isinstance(value, ShardedBase)]


def _part(value: ShardedBase) -> _Part:
    if isinstance(value, ShardedTensor):
        where = value.local_shape, value.global_shape, value.global_offset, value.replica_id
        return value.key, value.dtype, *where
    if isinstance(value, ShardedTensorFactory):
        return value.key, value.data.dtype, value.data.shape, value.replica_id
    return value.key, value.replica_id


def _own_bytes(state: Mapping[str, Any]) -> int:
    """The bytes of `state` that this rank writes."""
    parts = (part for part in nested_values(state) if isinstance(part, ShardedTensor | ShardedTensorFactory))
    return sum(part.data.nbytes for part in parts if is_main_replica(part.replica_id))


def _agree(own_bytes: int, folder: Path, *, is_known: bool) -> bool:
    """Collective: whether all ranks know the parts of the state. Raises UserError if there is no room for all of it."""
    # Megatron's writers report a full disk as an inconsistent file position, and lose the reason.
    sums = torch.tensor([own_bytes, is_known], dtype=torch.int64, device=device.device())
    torch.distributed.all_reduce(sums)
    needed, knowing = sums.tolist()
    if needed > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"cannot write a checkpoint of {needed:,} bytes to {folder.parent}: the disk has {free:,} bytes free; "
            "make room or choose another output_dir (the last complete checkpoint is untouched)"
        )
    return knowing == torch.distributed.get_world_size()


def _holds_reference(stored: TorchDistCheckpoint) -> bool:
    return any(key.startswith(REFERENCE) for key in stored.contents.tensors)
