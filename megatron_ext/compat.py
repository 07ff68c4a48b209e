"""Workarounds for megatron-core 0.16 and 0.19, one function each. Each has a test that fails without it.

`install` applies those that replace something inside megatron-core; the others are called where they are needed.
Workarounds that depend only on the device are in `device`; differences of the two versions are in `versions`.
"""

import contextlib
import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.fusions import fused_mla_yarn_rope_apply as latent_rotation
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.post_training.modelopt.layers import Linear as DuplicatedLinear
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_layer, moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import DeviceMesh
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from converters.errors import UserError
from converters.formats.torch_dist import load_metadata
from megatron_ext import device, versions
from megatron_ext.attention.rotary import PackedSequences
from megatron_ext.checkpoint import fp8_statistics
from megatron_ext.optimizer import hybrid_optimizer
from megatron_ext.optimizer.hybrid_optimizer import offload_beside_a_cpu
from megatron_ext.routing.token_dispatch import RaggedAllGather

_CUT_IN = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
"""Module class -> dimension along which its weight is sharded."""
_OF_GROUPED_EXPERTS = re.compile(r"\.experts\..*\.weight\d+$")
"""Names of experts' weights that are separate parameters of one grouped layer."""
_MADE_ONCE = {"sort_input_by_local_experts", "restore_output_by_local_experts", "over_budget"}
"""Tensors that token dispatchers create once, not in each pass."""


def install() -> None:
    """Apply the replacements; idempotent."""
    versions.install()
    load_checkpoints_without_running_their_code()
    gather_different_numbers_of_tokens()
    look_positions_up_in_tables_of_few_lengths()
    rotate_latent_queries_in_one_warp()
    rotate_latent_heads_in_whole_blocks()
    rotate_latent_heads_of_many_tokens()
    if not device.gpus():
        offload_beside_a_cpu()
    let_routers_multiply_as_torch()
    if device.has_transformer_engine():
        let_output_layer_go_without_apex()
    else:
        let_latent_attention_go_without_transformer_engine()
        let_selective_recompute_go_without_transformer_engine()


def rotate_latent_queries_in_one_warp() -> None:
    """Rotate queries of latent attention, and their gradients, by one warp, which reads everything before it writes.

    With `apply_rope_fusion` megatron-core's kernels read pairs and write halves, or vice versa, in place, without
    synchronizing their four warps. Occasionally a warp reads what another has already rotated, and the query or
    gradient is silently wrong (Megatron-LM's issue 4640).
    """
    if latent_rotation.HAVE_TRITON:
        for kernel in (latent_rotation.rotary_fwd_q_kernel, latent_rotation.rotary_bwd_q_kernel):
            for launch in kernel.configs:
                launch.num_warps = 1


def rotate_latent_heads_in_whole_blocks() -> None:
    """Make the block size of these kernels, and of those for keys, divide the number of heads.

    Otherwise the last block of a token reads and writes past its heads, into other tokens' (Megatron-LM's issue 7103).
    """
    if latent_rotation.HAVE_TRITON:
        for part in ("q", "kv"):
            for way in ("fwd", "bwd"):
                getattr(latent_rotation, f"rotary_{way}_{part}_kernel").early_config_prune = _in_whole_blocks


def rotate_latent_heads_of_many_tokens() -> None:
    """Make these kernels index with 64 bits: with 65,536 tokens of DeepSeek-V3 a rank has 2^31 elements and more.

    They multiply a token's index by the stride, both 32 bits. The product overflows to a negative number, and they read
    and write before their tensors.
    """
    if latent_rotation.HAVE_TRITON:
        for part in ("q", "kv"):
            for way in ("fwd", "bwd"):
                kernel = getattr(latent_rotation, f"rotary_{way}_{part}_kernel")
                function = kernel.fn.fn
                distances = [name for name in kernel.fn.arg_names if re.fullmatch(r"stride_\w+_seq", name)]
                function.__annotations__.update(dict.fromkeys(distances, "i64"))
                # Triton infers an argument's type from its value, unless the signature is annotated.
                kernel.fn = latent_rotation.triton.jit(function)


def _in_whole_blocks(launches: Sequence[Any], given: Mapping[str, Any], **_constants: Any) -> Sequence[Any]:
    return [launch for launch in launches if given["head_num"] % launch.kwargs["BLOCK_H"] == 0]


def let_output_layer_go_without_apex() -> None:
    """`ColumnParallelLinear` refuses `gradient_accumulation_fusion` without apex, whose kernel its backward pass calls.

    Transformer Engine's modules fuse by their own kernels, and the only remaining ColumnParallelLinear, the output
    layer, accumulates its gradient itself (`log_probs`). Local modules get the option only with apex (`device_fields`).
    """
    layers._grad_accum_fusion_available = True


def let_routers_multiply_as_torch() -> None:
    """Routers use Transformer Engine's `te_general_gemm` if it is installed, in TF32 if both operands are float32.

    So do routers of local modules, which float32 models use for true float32. megatron-core 0.16 finds it in
    Transformer Engine 2.9, 0.19 also in later ones. Without Transformer Engine `moe_utils` never defines the name, but
    compares it with None: every MoE forward would raise NameError.
    """
    moe_utils.te_general_gemm = None


def let_latent_attention_go_without_transformer_engine() -> None:
    """0.16: `multi_latent_attention` sets HAVE_TE although Transformer Engine is missing.

    It decides by an import that always succeeds; `isinstance(x, TELinear)` then raises TypeError. 0.19 refuses a
    replicated down projection, whose class it only knows with Transformer Engine.
    """
    multi_latent_attention.HAVE_TE = False
    multi_latent_attention.Linear = DuplicatedLinear


def let_selective_recompute_go_without_transformer_engine() -> None:
    """`CheckpointWithoutOutput(fp8=False)` takes the FP8 path (`fp8 is not None`), whose names are undefined."""

    def no_context(**_options: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    tensor_parallel_random.FP8GlobalStateManager = SimpleNamespace(
        is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
    )
    tensor_parallel_random.activation_recompute_forward = no_context
    tensor_parallel_random.fp8_autocast = no_context


def gather_different_numbers_of_tokens() -> None:
    """The all-gather token dispatcher assumes that every rank has as many tokens as this one.

    Ragged micro-batches differ between data-parallel ranks. See `RaggedAllGather`.
    """
    moe_layer.MoEAllGatherTokenDispatcher = RaggedAllGather


def look_positions_up_in_tables_of_few_lengths() -> None:
    """`RotaryEmbedding` makes a table as long as the longest sequence, and caches the last 32.

    In ragged micro-batches the longest length hardly ever repeats: the tables stay on the device, and none is reused.
    Take the length given by `PackedSequences`.
    """
    if hasattr(RotaryEmbedding.get_rotary_seq_len, "original"):
        return
    original = RotaryEmbedding.get_rotary_seq_len

    def rows(self: RotaryEmbedding, *arguments: Any, **options: Any) -> int:
        given = (*arguments, *options.values())
        packed = next((each for each in given if isinstance(each, PackedSequences)), PackedSequences())
        return packed.rotary_rows or original(self, *arguments, **options)

    rows.original = original  # type: ignore[attr-defined]
    RotaryEmbedding.get_rotary_seq_len = rows


def drop_rotary_tables() -> None:
    """Drop the tables cached by rotary embeddings, which would stay on the device when weights are offloaded."""
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()


def drop_routes_of_tokens(chunks: Sequence[torch.nn.Module]) -> None:
    """Drop the last micro-batch's routing tensors, which the dispatchers of all layers keep.

    No later pass reads them. They would stay on the device when weights are offloaded: 1.3 GB for 48 layers of 128
    experts and 16,384 tokens, in pieces that fragment memory, so that what is around them cannot be freed.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, moe_layer.MoELayer):
            dispatcher = module.token_dispatcher
            for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None) or SimpleNamespace()):
                for name, kept in vars(owner).items():
                    if isinstance(kept, torch.Tensor) and name not in _MADE_ONCE:
                        setattr(owner, name, None)


def config_of_variable_lengths(config_class: type[TransformerConfig], fields: Mapping[str, Any]) -> TransformerConfig:
    """Make a configuration of `fields` with variable sequence lengths.

    megatron-core refuses these with the all-gather dispatcher, the default even without experts; `RaggedAllGather`
    supports them.
    """
    gathers = fields["moe_token_dispatcher_type"] == "allgather"
    config = config_class(**{**fields, "variable_seq_lengths": not gathers})
    config.variable_seq_lengths = True
    return config


def shard_on_this_device(wrapper: ModuleType) -> None:
    """`TorchFullyShardedDataParallel` makes its mesh of CUDA devices, even on a CPU.

    `wrapper` is the module that defines it.
    """
    on_this_device = SimpleNamespace(from_group=lambda group, _kind: DeviceMesh.from_group(group, device.device().type))
    vars(wrapper)["DeviceMesh"] = on_this_device


def load_checkpoints_without_running_their_code() -> None:
    """Loading unpickles `.metadata` with `pickle.load` and objects with `torch.load(weights_only=False)`.

    Both can run arbitrary code. Read the former with an allow-list of classes, and first try the latter with those that
    torch and megatron-core call safe: what passes is safe to load either way. FP8 statistics are pickles within.
    """
    if torch_dist._get_filesystem_reader is _table_of_contents:
        return
    original = torch_dist.MCoreLoadPlanner.load_bytes

    def load_bytes(self: torch_dist.MCoreLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.storage_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
            if fp8_statistics.EXTRA_STATE in name:
                fp8_statistics.require_readable(loaded)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise UserError(
                f"the checkpoint's object {name} is damaged or no plain values, and is not loaded; copy the checkpoint"
                " again"
            ) from error
        value.seek(0)
        original(self, read_item, value)

    torch_dist.MCoreLoadPlanner.load_bytes = load_bytes
    torch_dist._get_filesystem_reader = _table_of_contents


def _table_of_contents(checkpoint_dir: str | Path, **_options: Any) -> FileSystemReader:
    return _SafeReader(checkpoint_dir)


class _SafeReader(FileSystemReader):
    """Reads `.metadata` once, without running code in it."""

    _metadata: Metadata | None = None

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = load_metadata(Path(self.path))
        return self._metadata


@contextlib.contextmanager
def user_error_of_any_rank() -> Iterator[None]:
    """Unwrap UserErrors: if a rank fails to read, torch raises its own exception on all ranks, with all tracebacks."""
    try:
        yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values() if isinstance(failure, UserError)]
        raise (failures[0] if failures else error) from error


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers with parameters of this rank; experts, for example, have one of their own."""
    all_parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in all_parts if part.optimizer is not None]


def prime_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Initialise an optimizer's state to zeros before the first step, which does not change that step.

    Otherwise there are no tensors to load a checkpoint into. Existing state is kept. megatron-core does this for Adam,
    but omits torch's step counter.
    """
    for part in parts(optimizer):
        inner = part.optimizer
        if isinstance(inner, HybridDeviceOptimizer):
            hybrid_optimizer.prime(inner)
            continue
        new = [each for group in inner.param_groups for each in group["params"] if not inner.state[each]]
        if part.config.use_precision_aware_optimizer:
            initialise_in_other_types(inner, new)
        elif part.init_state_fn is not None:
            part.init_state_fn(inner, part.config)
        for parameter in new:
            if isinstance(inner, torch.optim.Adam):
                inner.state[parameter]["step"] = torch.zeros(())
            elif part.config.optimizer == "sgd" and part.config.sgd_momentum:
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def initialise_in_other_types(adam: Any, parameters: Sequence[torch.Tensor]) -> None:
    """Initialise the state of `parameters` in Transformer Engine's Adam, as its own first step does.

    megatron-core calls `initialize_state` with only the parameter, which raises TypeError from Transformer Engine 2.1
    on: it also needs to know whether main parameters are stored as the remainder to the weights.
    """
    for parameter in parameters:
        adam.initialize_state(parameter, adam.store_param_remainders and parameter.dtype == torch.bfloat16)


def drop_quantised_weights(chunks: Sequence[torch.nn.Module]) -> None:
    """Drop Transformer Engine's cached 8- or 4-bit copies of weights, which are neither parameters nor buffers.

    They would stay on the device when weights are offloaded. The next pass makes them again.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(kept := getattr(module, "_fp8_workspaces", None), dict):
            kept.clear()


def set_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Set an optimizer's step count, which torch's Adam keeps per parameter, and the fused one per group."""
    for inner in (inner for part in parts(optimizer) for inner in hybrid_optimizer.inner_optimizers(part.optimizer)):
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(steps)
        if not isinstance(inner, torch.optim.Adam | torch.optim.SGD):
            for group in inner.param_groups:
                group["step"] = steps


def mark_expert_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Make gradients of experts be reduced over the ranks that hold the same experts; call before wrapping in DDP.

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
    """Make the gradient norm count the shards of all tensor-parallel ranks; call before wrapping in DDP.

    megatron-core marks sharded parameters (`tensor_model_parallel`) only when it initialises them. If weights are
    loaded instead, all would count as replicas of tensor-parallel rank 0's, and norm and clipping would cover only part
    of the gradient. The same holds for experts of Transformer Engine's grouped layers from 2.13 on; up to 2.12 they
    mark their weights themselves.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        for kind, dimension in _CUT_IN.items():
            weight = getattr(module, "weight", None)
            if isinstance(module, kind) and weight is not None and not hasattr(weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dimension, stride=1)
    for name, weight in (named for chunk in chunks for named in chunk.named_parameters()):
        if _OF_GROUPED_EXPERTS.search(name) and not hasattr(weight, "tensor_model_parallel"):
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]


def unmark_duplicated_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Make the gradient norm count weights replicated over tensor-parallel ranks once; call before wrapping in DDP.

    Transformer Engine marks every linear weight as sharded, even without a parallel mode, and megatron-core's
    `TELinear` leaves it so: latent attention's down projections would count once per rank. Experts have no mode either
    if megatron-core communicates for them, nor have shared ones with `moe_shared_expert_overlap`, but their weights do
    differ.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            is_of_experts = ".experts." in f"{name}." or ".shared_experts." in f"{name}."
            if getattr(module, "parallel_mode", "") is None and not is_of_experts:
                for parameter in module.parameters(recurse=False):
                    parameter.tensor_model_parallel = False
