"""Workarounds for megatron-core 0.16.1, one function each. Every one has a test that fails without it.

`install` applies those that replace something inside megatron-core; the others are called where they are needed.
Workarounds that depend on the device alone are in `device`.
"""

import contextlib
import functools
import io
import pickle
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from isal.isal_zlib import crc32
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from converters.errors import UserError
from converters.formats.torch_dist import load_metadata
from converters.stream.targets import Written
from megatron_ext import device

_CUT_IN = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
"""Kind of module -> the dimension in which its weight is cut."""


def install() -> None:
    """Apply the replacements; idempotent."""
    copy_optimizer_state_by_saved_keys()
    collect_write_results_in_this_process()
    load_checkpoints_without_running_their_code()
    if device.has_transformer_engine():
        let_output_layer_go_without_apex()
    else:
        define_router_gemm()
        let_latent_attention_go_without_transformer_engine()
        let_selective_recompute_go_without_transformer_engine()


def let_output_layer_go_without_apex() -> None:
    """`ColumnParallelLinear` refuses `gradient_accumulation_fusion` without apex, whose kernel its backward calls.

    With Transformer Engine all layers fuse by its own kernels, and the one ColumnParallelLinear that is left, the
    output layer, adds up its gradient itself (`log_probs`).
    """
    layers._grad_accum_fusion_available = True


def define_router_gemm() -> None:
    """Without Transformer Engine, `moe_utils` never defines `te_general_gemm`, then asks whether it is None.

    Every MoE forward would end in a NameError.
    """
    moe_utils.te_general_gemm = None


def let_latent_attention_go_without_transformer_engine() -> None:
    """`multi_latent_attention` sets HAVE_TE although Transformer Engine is missing.

    It decides by an import that always succeeds; `isinstance(x, TELinear)` then raises TypeError.
    """
    multi_latent_attention.HAVE_TE = False


def let_selective_recompute_go_without_transformer_engine() -> None:
    """`CheckpointWithoutOutput(fp8=False)` takes the FP8 path (`fp8 is not None`), whose names are not defined."""

    def no_context(**_options: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    tensor_parallel_random.FP8GlobalStateManager = SimpleNamespace(
        is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
    )
    tensor_parallel_random.activation_recompute_forward = no_context
    tensor_parallel_random.fp8_autocast = no_context


def copy_optimizer_state_by_saved_keys() -> None:
    """Loading a checkpoint copies every key of the optimizer's state, but `step` is not saved per parameter.

    torch's AdamW, which stands in for the fused one, keeps `step` there: KeyError. Copy what was saved instead; `step`
    is restored with the parameter groups.
    """
    if hasattr(DistributedOptimizer._set_main_param_and_optimizer_states, "original"):
        return
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: DistributedOptimizer, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            original(self, model_param, tensors)
            return
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        present = {"param": main_param, **self.optimizer.state[main_param]}
        with torch.no_grad():
            for key, saved in tensors.items():
                present[key].copy_(saved)

    set_states.original = original  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def collect_write_results_in_this_process() -> None:
    """Saving starts a server process for a queue that, in a save that is waited for, only this process uses.

    The server imports the whole program anew, seconds per rank at the first checkpoint, and stays until the end.
    """
    filesystem_async._results_queue = queue.Queue()


def load_checkpoints_without_running_their_code() -> None:
    """Loading unpickles `.metadata` with `pickle.load` and objects with `torch.load(weights_only=False)`.

    Either calls whatever the file names. Read the one with classes of a list only, and try the other first with those
    that torch and megatron-core call safe: what passes can be loaded in any way.
    """
    if torch_dist._get_filesystem_reader is _table_of_contents:
        return
    original = torch_dist.MCoreLoadPlanner.load_bytes

    def load_bytes(self: torch_dist.MCoreLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise UserError(
                f"the checkpoint's object {read_item.storage_index.fqn} is damaged or no plain values, and is not"
                " loaded; copy the checkpoint again"
            ) from error
        value.seek(0)
        original(self, read_item, value)

    torch_dist.MCoreLoadPlanner.load_bytes = load_bytes
    torch_dist._get_filesystem_reader = _table_of_contents


def _table_of_contents(checkpoint_dir: str | Path, cache_metadata: bool = False) -> FileSystemReader:  # noqa: ARG001
    return _SafeReader(checkpoint_dir)


class _SafeReader(FileSystemReader):
    """Reads `.metadata` once, and runs nothing of it."""

    _metadata: Metadata | None = None

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = load_metadata(Path(self.path))
        return self._metadata


@contextlib.contextmanager
def user_error_of_any_rank() -> Iterator[None]:
    """Where a rank fails to read, torch raises on all of them an exception of its own, with all tracebacks in it."""
    try:
        yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values() if isinstance(failure, UserError)]
        raise (failures[0] if failures else error) from error


@contextlib.contextmanager
def checksums_of_writes() -> Iterator[dict[str, list[Written]]]:
    """Collect a save's writes within the context, with checksums, on the rank that writes `.metadata`; {} on others.

    megarl's manifest has them, and reading a checkpoint of terabytes again would take as long as writing it. The
    writers are forked processes, whose results alone come back.
    """
    written: dict[str, list[Written]] = {}
    write_item, finish = filesystem_async._write_item, filesystem_async.FileSystemWriterAsync.finish

    @functools.wraps(write_item)
    def write_with_checksum(transforms: Any, stream: Any, *arguments: Any, **options: Any) -> "_Checked":
        summed = _SummedStream(stream)
        result = write_item(transforms, summed, *arguments, **options)
        return _Checked(result.index, result.size_in_bytes, result.storage_data, summed.crc32)

    def finish_and_note(self: Any, metadata: Metadata, results: list[list["_Checked"]]) -> None:
        for each in (result for of_rank in results for result in of_rank):
            place = each.storage_data
            name = each.index.fqn + (str(list(each.index.offset)) if each.index.offset is not None else "")
            written[name] = [Written(place.relative_path, place.offset, place.length, each.crc32)]
        finish(self, metadata, results)

    filesystem_async._write_item = write_with_checksum
    filesystem_async.FileSystemWriterAsync.finish = finish_and_note
    try:
        yield written
    finally:
        filesystem_async._write_item = write_item
        filesystem_async.FileSystemWriterAsync.finish = finish


@dataclass(frozen=True)
class _Checked(WriteResult):
    crc32: int


class _SummedStream:
    """A file that is written from its beginning to its end, with the checksum of what has been."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self.crc32 = stream, 0

    def write(self, content: Any) -> int:
        self.crc32 = crc32(content, self.crc32)
        return self._stream.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def prime_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Give torch's AdamW its state before the first step.

    `sharded_state_dict(is_loading=True)` lists the tensors to load from the state that exists; without any, the saved
    moments are left out. Parameters that have a state keep it.
    """
    for torch_optimizer in _torch_adamw(optimizer):
        for group in torch_optimizer.param_groups:
            for parameter in group["params"]:
                if not torch_optimizer.state[parameter]:
                    torch_optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def separate_step_counters(optimizer: MegatronOptimizer) -> None:
    """Give each parameter a step counter of its own; call after loading a checkpoint.

    megatron-core puts one tensor into the state of all parameters, and torch's AdamW then counts it up once per
    parameter: the bias correction of the next steps is wrong, silently.
    """
    for torch_optimizer in _torch_adamw(optimizer):
        for state in torch_optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()


def mark_expert_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Have the gradients of experts reduced over the ranks that hold the same experts; call before wrapping in DDP.

    megatron-core marks them (`allreduce = False`) only for EP > 1. With an expert-tensor-parallel size other than the
    tensor-parallel one, EP = 1 needs it just as well: the gradients would be reduced over the wrong ranks, silently.
    """
    tensor, expert_tensor = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    if tensor == expert_tensor:
        return
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]


def mark_tensor_parallel_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Have the norm of the gradients count the parts that all tensor-parallel ranks have; call before wrapping in DDP.

    megatron-core marks parameters that are cut (`tensor_model_parallel`) only as it initialises them. Where weights are
    read instead, all would count as copies of those of tensor-parallel rank 0: the norm, and with it the clipping,
    would be that of a part of the gradient.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        for kind, dimension in _CUT_IN.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, kind) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dimension, stride=1)


def unmark_duplicated_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Have the norm of the gradients count weights once that are the same on all tensor-parallel ranks; before DDP.

    Transformer Engine marks the weight of every linear layer as cut, also that of one without a parallel mode, and
    megatron-core's `TELinear` leaves it so: latent attention's down projections would count as often as there are
    ranks. Experts have no mode either where megatron-core communicates for them, and theirs do differ.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if getattr(module, "parallel_mode", "") is None and ".experts." not in f"{name}.":
                for parameter in module.parameters(recurse=False):
                    parameter.tensor_model_parallel = False


def _torch_adamw(optimizer: MegatronOptimizer) -> Iterator[torch.optim.AdamW]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.AdamW):
            yield part.optimizer
