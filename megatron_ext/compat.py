"""Workarounds for megatron-core 0.16 and 0.19, one function each. Every one has a test that fails without it.

`install` applies those that replace something inside megatron-core; the others are called where they are needed.
Workarounds that depend on the device alone are in `device`; where the two versions differ is in `versions`.
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
"""Kind of module -> the dimension in which its weight is cut."""
_OF_GROUPED_EXPERTS = re.compile(r"\.experts\..*\.weight\d+$")
"""Names of weights of experts that are a parameter each of one layer."""
_MADE_ONCE = {"sort_input_by_local_experts", "restore_output_by_local_experts", "over_budget"}
"""Tensors that dispatchers of tokens make once, and not in each pass."""


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
    """Have one warp of a GPU rotate queries of latent attention, and their gradients: it reads all that it writes over.

    With `apply_rope_fusion` megatron-core's kernels read pairs and write halves, or the other way round, over the same
    numbers, and none of their four warps waits for the others: now and then one reads what another has rotated, and
    the query or the gradient is wrong, with nothing said (Megatron-LM's issue 4640).
    """
    if latent_rotation.HAVE_TRITON:
        for kernel in (latent_rotation.rotary_fwd_q_kernel, latent_rotation.rotary_bwd_q_kernel):
            for launch in kernel.configs:
                launch.num_warps = 1


def rotate_latent_heads_in_whole_blocks() -> None:
    """Have a program of these kernels, and of those for keys, take as many heads as divide the number that there are.

    With a block that the heads do not fill, the last one reads and writes behind the heads of its token: other tokens'
    (Megatron-LM's issue 7103).
    """
    if latent_rotation.HAVE_TRITON:
        for part in ("q", "kv"):
            for way in ("fwd", "bwd"):
                getattr(latent_rotation, f"rotary_{way}_{part}_kernel").early_config_prune = _in_whole_blocks


def rotate_latent_heads_of_many_tokens() -> None:
    """Have these kernels count numbers in 64 bits: a rank may have 2^31 and more, with 65,536 tokens of DeepSeek-V3.

    They multiply the index of a token by the distance from one to the next, both of 32 bits: the product becomes
    negative, and they read, and write, what lies before their tensors.
    """
    if latent_rotation.HAVE_TRITON:
        for part in ("q", "kv"):
            for way in ("fwd", "bwd"):
                kernel = getattr(latent_rotation, f"rotary_{way}_{part}_kernel")
                function = kernel.fn.fn
                distances = [name for name in kernel.fn.arg_names if re.fullmatch(r"stride_\w+_seq", name)]
                function.__annotations__.update(dict.fromkeys(distances, "i64"))
                # A launch takes the type of a number from the number, except where the signature has one.
                kernel.fn = latent_rotation.triton.jit(function)


def _in_whole_blocks(launches: Sequence[Any], given: Mapping[str, Any], **_constants: Any) -> Sequence[Any]:
    return [launch for launch in launches if given["head_num"] % launch.kwargs["BLOCK_H"] == 0]


def let_output_layer_go_without_apex() -> None:
    """`ColumnParallelLinear` refuses `gradient_accumulation_fusion` without apex, whose kernel its backward calls.

    Transformer Engine's modules fuse by its own kernels, and the one ColumnParallelLinear that is left beside them, the
    output layer, adds up its gradient itself (`log_probs`). Local modules get the option with apex alone
    (`device_fields`).
    """
    layers._grad_accum_fusion_available = True


def let_routers_multiply_as_torch() -> None:
    """Routers multiply by Transformer Engine's `te_general_gemm` where it is installed, in TF32 if both are float32.

    So do those of local modules, which models in float32 get for being multiplied as such. megatron-core 0.16 finds it
    in Transformer Engine 2.9, 0.19 in later ones, too. Without Transformer Engine `moe_utils` never defines it, then
    asks whether it is None: every MoE forward would end in a NameError.
    """
    moe_utils.te_general_gemm = None


def let_latent_attention_go_without_transformer_engine() -> None:
    """0.16: `multi_latent_attention` sets HAVE_TE although Transformer Engine is missing.

    It decides by an import that always succeeds; `isinstance(x, TELinear)` then raises TypeError. 0.19 refuses a down
    projection that is the same on all ranks, of which it knows the class only beside Transformer Engine.
    """
    multi_latent_attention.HAVE_TE = False
    multi_latent_attention.Linear = DuplicatedLinear


def let_selective_recompute_go_without_transformer_engine() -> None:
    """`CheckpointWithoutOutput(fp8=False)` takes the FP8 path (`fp8 is not None`), whose names are not defined."""

    def no_context(**_options: Any) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    tensor_parallel_random.FP8GlobalStateManager = SimpleNamespace(
        is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None
    )
    tensor_parallel_random.activation_recompute_forward = no_context
    tensor_parallel_random.fp8_autocast = no_context


def gather_different_numbers_of_tokens() -> None:
    """The all-gather dispatcher of experts gathers as many tokens from every rank as this one has.

    Ragged micro-batches differ between data-parallel ranks. See `RaggedAllGather`.
    """
    moe_layer.MoEAllGatherTokenDispatcher = RaggedAllGather


def look_positions_up_in_tables_of_few_lengths() -> None:
    """`RotaryEmbedding` makes a table as long as the longest sequence, and keeps the 32 that it made last.

    Ragged micro-batches hardly ever have two longest sequences of one length: the tables stay on the device, and none
    is used again. Take the length that `PackedSequences` says.
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
    """Forget the tables that rotary embeddings keep: they would stay on the device where the weights leave it."""
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()


def drop_routes_of_tokens(chunks: Sequence[torch.nn.Module]) -> None:
    """Forget what dispatchers of all layers keep of the last micro-batch: which token went to which expert.

    A pass writes it, and no later one reads it. It would stay on the device where the weights leave it: 1.3 GB for 48
    layers of 128 experts and 16,384 tokens, in pieces that keep the memory around them from being given back.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, moe_layer.MoELayer):
            dispatcher = module.token_dispatcher
            for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None) or SimpleNamespace()):
                for name, kept in vars(owner).items():
                    if isinstance(kept, torch.Tensor) and name not in _MADE_ONCE:
                        setattr(owner, name, None)


def config_of_variable_lengths(config_class: type[TransformerConfig], fields: Mapping[str, Any]) -> TransformerConfig:
    """A configuration of `fields`, and of micro-batches that differ in length.

    megatron-core refuses these with the all-gather dispatcher, in a model without experts, too, where it is the
    default; `RaggedAllGather` takes them.
    """
    gathers = fields["moe_token_dispatcher_type"] == "allgather"
    config = config_class(**{**fields, "variable_seq_lengths": not gathers})
    config.variable_seq_lengths = True
    return config


def shard_on_this_device(wrapper: ModuleType) -> None:
    """`TorchFullyShardedDataParallel` makes its mesh of CUDA devices, whatever the ranks compute on.

    `wrapper` is the module that defines it.
    """
    on_this_device = SimpleNamespace(from_group=lambda group, _kind: DeviceMesh.from_group(group, device.device().type))
    vars(wrapper)["DeviceMesh"] = on_this_device


def load_checkpoints_without_running_their_code() -> None:
    """Loading unpickles `.metadata` with `pickle.load` and objects with `torch.load(weights_only=False)`.

    Either calls whatever the file names. Read the one with classes of a list only, and try the other first with those
    that torch and megatron-core call safe: what passes can be loaded in any way. Statistics of FP8 are pickles within.
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


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Optimizers that have parameters of this rank; experts, for example, have an optimizer of their own."""
    all_parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in all_parts if part.optimizer is not None]


def prime_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer its state before the first step, as zeros, with which the first step is the same.

    Otherwise there are no tensors to load a checkpoint into. Parameters that have a state keep it.
    megatron-core does it for Adam, but leaves out torch's counter of steps, without which torch takes one.
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
    """Give `parameters` their first state in Transformer Engine's Adam, as that does it itself in a first step.

    megatron-core calls `initialize_state` with the parameter alone, for which Transformer Engine from 2.1 on raises
    TypeError: it wants to be told, too, whether main parameters are kept as what the weights lack of them.
    """
    for parameter in parameters:
        adam.initialize_state(parameter, adam.store_param_remainders and parameter.dtype == torch.bfloat16)


def drop_quantised_weights(chunks: Sequence[torch.nn.Module]) -> None:
    """Forget what Transformer Engine's layers keep of their weights in 8 or 4 bits, neither parameter nor buffer.

    It would stay on the device where the weights leave it. The next pass makes it again, from the weights of then.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(kept := getattr(module, "_fp8_workspaces", None), dict):
            kept.clear()


def set_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Let an optimizer count on from so many steps: torch's Adam does it by parameter, the fused one by group."""
    for inner in (inner for part in parts(optimizer) for inner in hybrid_optimizer.inner_optimizers(part.optimizer)):
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(steps)
        if not isinstance(inner, torch.optim.Adam | torch.optim.SGD):
            for group in inner.param_groups:
                group["step"] = steps


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
    would be that of a part of the gradient. So would experts of Transformer Engine's grouped layers, which mark their
    weights themselves up to 2.12, and not from 2.13 on.
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
    """Have the norm of the gradients count weights once that are the same on all tensor-parallel ranks; before DDP.

    Transformer Engine marks the weight of every linear layer as cut, also that of one without a parallel mode, and
    megatron-core's `TELinear` leaves it so: latent attention's down projections would count as often as there are
    ranks. Experts have no mode either where megatron-core communicates for them, nor have shared ones with
    `moe_shared_expert_overlap`, and theirs do differ.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            is_of_experts = ".experts." in f"{name}." or ".shared_experts." in f"{name}."
            if getattr(module, "parallel_mode", "") is None and not is_of_experts:
                for parameter in module.parameters(recurse=False):
                    parameter.tensor_model_parallel = False
