"""A run's options of Megatron, grouped by the class that reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from converters.architectures import Lora
from converters.errors import UserError, did_you_mean
from converters.layouts.megatron import ParallelSizes
from megatron_ext.options.supported_options import ADAPTER_IN_ROWS, DETERMINISTIC

_BLOCKS = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 32, "custom": 32}
"""Recipe -> rows per block: Transformer Engine's 8- and 4-bit matmuls require a multiple of this number of rows."""
_GATHERED = ("hidden_size", "q_lora_rank", "kv_lora_rank")
"""Fields with the widths of rows that the ranks of a tensor-parallel group gather."""
_BIAS_RATE = "moe_router_bias_update_rate"
_DEFAULT_RECIPES = {"fp8": "delayed", "fp4": "nvfp4"}


MtpTraining = Literal["detached", "joint", "none"]
"""Layers for multi-token prediction train by themselves, together with the rest of the model, or not at all."""


@dataclass(frozen=True)
class AdapterOptions:
    """Training of a low-rank adapter instead of the weights."""

    lora: Lora
    seed: int = 0
    """Seed for initialising a new adapter."""
    path: Path | None = None
    """PEFT folder of the adapter to start from."""
    merge: bool = True
    """Whether refits send the adapted weights; false sends A and B alone."""


@dataclass(frozen=True)
class MegatronOptions:
    """The `megatron` group of the configuration: each mapping has the fields of one class, under Megatron's names.

    Raises UserError for an unknown 8- or 4-bit recipe, and for options that exclude each other.
    """

    parallel: ParallelSizes
    params_dtype: torch.dtype
    transformer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    distributed: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    fp32_logits: bool = False
    """See `linear_log_probs`."""
    shared_prefixes: bool = False
    """Whether prefixes that several sequences of a micro-batch share are computed once."""
    mtp_training: MtpTraining = "detached"
    """How layers for multi-token prediction train; see `multi_token_prediction`."""
    freeze_moe_router: bool = False
    """Whether routers are frozen."""
    adapter: AdapterOptions | None = None
    """Adapter to train instead of the weights, if any."""

    def __post_init__(self) -> None:
        if self.shared_prefixes and self.parallel.context_parallel_size > 1:
            raise UserError(
                "loop.shared_prefixes needs whole sequences on each rank, and megatron.context_parallel_size="
                f"{self.parallel.context_parallel_size} cuts them: choose one of the two"
            )
        if self.adapter is not None and self.parallel.use_torch_fsdp2:
            raise UserError(ADAPTER_IN_ROWS)
        if self.freeze_moe_router and (rate := self.transformer.get(_BIAS_RATE)):
            raise UserError(
                f"model.freeze_moe_router=true keeps the routers as they were loaded, and megatron.{_BIAS_RATE}={rate}"
                " changes their bias: choose one of the two"
            )
        if self.optimizer.get("optimizer_cpu_offload") and self.params_dtype == torch.float32:
            raise UserError(
                "megatron.optimizer_cpu_offload=true needs model.dtype=bf16: its optimizer takes fp32"
                " main parameters beside the weights, and none that are parts of them; leave one of the two out"
            )
        for option, recipe in self._recipes().items():
            if recipe not in _BLOCKS:
                raise UserError(
                    f"megatron.{option}={recipe} is none of {', '.join(_BLOCKS)}{did_you_mean(recipe, _BLOCKS)}"
                )

    @property
    def is_deterministic(self) -> bool:
        """Whether results are bitwise reproducible; processes also need the environment of `roles.trainer_role`."""
        return bool(self.transformer.get(DETERMINISTIC))

    @property
    def steps_on_host(self) -> bool:
        """Whether the optimizer, or a part of it, runs on the host."""
        return bool(self.optimizer.get("optimizer_cpu_offload"))

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches must be a multiple of this: interleaved pipeline stages run them in groups."""
        if self.parallel.chunks == 1:
            return 1
        size = self.parallel.pipeline_model_parallel_size
        return self.transformer.get("microbatch_group_size_per_vp_stage") or size

    @property
    def token_multiple(self) -> int:
        """A micro-batch's number of tokens must be a multiple of this, so that every rank has whole blocks."""
        return max(map(_BLOCKS.__getitem__, self._recipes().values()), default=1) * (
            self.parallel.tensor_model_parallel_size
        )

    def check_widths(self, fields: Mapping[str, Any]) -> None:
        """Raise UserError for a model whose widths in `fields` Transformer Engine (up to 2.11) cannot gather."""
        tensor = self.parallel.tensor_model_parallel_size
        if tensor == 1 or "blockwise" not in self._recipes().values():
            return
        for name in _GATHERED:
            if (width := fields.get(name) or 0) % _BLOCKS["blockwise"]:
                raise UserError(
                    f"megatron.fp8_recipe=blockwise with megatron.tensor_model_parallel_size={tensor} needs a {name}"
                    f" that is a multiple of {_BLOCKS['blockwise']}, and that of this model is {width}: take another"
                    " recipe, such as tensorwise, or no tensor parallelism"
                )

    @property
    def scales_by_history(self) -> bool:
        """Whether 8-bit matmuls use delayed scaling: scales from the largest magnitudes of earlier steps."""
        return "delayed" in self._recipes().values()

    def _recipes(self) -> dict[str, str]:
        """Option -> recipe, for the 8- and 4-bit formats that are on."""
        on = [kind for kind in _DEFAULT_RECIPES if self.transformer.get(kind)]
        return {f"{kind}_recipe": self.transformer.get(f"{kind}_recipe") or _DEFAULT_RECIPES[kind] for kind in on}
