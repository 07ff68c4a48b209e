"""Builds the distributed optimizer and its learning-rate schedule, from fields under Megatron's names."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from converters.errors import UserError
from megatron_ext import device
from megatron_ext.optimizer.fully_sharded import FullySharded, wrap_fully_sharded

Wrapped: TypeAlias = DistributedDataParallel | FullySharded


def wrap_distributed(
    chunks: Sequence[torch.nn.Module], fields: Mapping[str, Any], *, fully_sharded: bool
) -> Sequence[Wrapped]:
    """Wrap model chunks for Megatron's data parallelism; gradients are reduced in fp32 unless `fields` say otherwise.

    With `fully_sharded`, torch's FSDP2 is used, which reduces gradients in the dtype of the weights.
    """
    if fully_sharded:
        return [wrap_fully_sharded(chunk, fields) for chunk in chunks]
    config = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": True,
            # A gradient that is NaN must stop this step, not the run a few steps later.
            "check_for_nan_in_grad": True,
            **fields,
        }
    )
    return [
        # Only the first chunk is bucketed, as in Megatron's own training loop.
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def build_optimizer(
    chunks: Sequence[Wrapped], fields: Mapping[str, Any], params_dtype: torch.dtype
) -> MegatronOptimizer:
    """Build the optimizer of the wrapped `chunks`; `fields` are those of OptimizerConfig.

    Raises UserError for an optimizer that this device does not support.
    """
    if fields.get("use_precision_aware_optimizer") and not device.has_transformer_engine():
        raise UserError(
            "megatron.use_precision_aware_optimizer=true needs Transformer Engine's Adam on a GPU: leave it out here"
        )
    config = OptimizerConfig(
        **{
            "optimizer": "adam",
            "use_distributed_optimizer": chunks[0].ddp_config.use_distributed_optimizer,
            "clip_grad": 1.0,
            "weight_decay": 0.0,
            "bf16": params_dtype == torch.bfloat16,
            "params_dtype": params_dtype,
            # The default of Megatron's training script; megatron-core's own would offload nothing.
            "optimizer_offload_fraction": 1.0,
            "pin_cpu_grads": device.gpus() > 0,
            **fields,
            # Parameter groups store it, and the schedule prefers their value; Megatron's own default is None.
            "min_lr": fields.get("min_lr") or 0.0,
        }
    )
    return get_megatron_optimizer(config, list(chunks))


def build_scheduler(
    optimizer: MegatronOptimizer, optimizer_fields: Mapping[str, Any], fields: Mapping[str, Any], total_steps: int
) -> OptimizerParamScheduler:
    """Build the learning-rate schedule, counted in optimizer steps.

    `fields` have the names of Megatron-LM's arguments (lr_warmup_steps, lr_decay_steps, lr_decay_style, ...); without
    any, the rate is constant. A run that is shorter than its warm-up ends within it.
    """
    warmup_steps = fields.get("lr_warmup_steps", 0)
    weight_decay = optimizer_fields.get("weight_decay", 0.0)
    lr = optimizer_fields["lr"]
    return OptimizerParamScheduler(
        optimizer,
        init_lr=fields.get("lr_warmup_init", 0.0),
        max_lr=lr,
        min_lr=optimizer_fields.get("min_lr") or 0.0,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=fields.get("lr_decay_steps") or max(total_steps, warmup_steps + 1),
        lr_decay_style=fields.get("lr_decay_style", "constant"),
        start_wd=fields.get("start_weight_decay", weight_decay),
        end_wd=fields.get("end_weight_decay", weight_decay),
        wd_incr_steps=total_steps,
        wd_incr_style=fields.get("weight_decay_incr_style", "constant"),
        wsd_decay_steps=fields.get("lr_wsd_decay_steps"),
        lr_wsd_decay_style=fields.get("lr_wsd_decay_style", "exponential"),
        # A resumed run follows its configuration; only the position in the schedule comes from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
