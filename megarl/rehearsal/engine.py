"""The engines of a job: each worker of one is built from the engine's own modules, whose loader shows its layout.

If that is not possible, an engine's memory is computed in closed form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from converters.architectures import Architecture, Lora, read_architecture
from converters.dtypes import dtype_name
from converters.layouts.traced_layout import LoadTrace, untraced
from converters.number_formats import NumberFormat, number_format
from megarl.config.lora import adapter_options
from megarl.models.policy import check_cut, check_draft
from megarl.planning.memory.engine import (
    adapter_slot_bytes,
    engine_activation_bytes,
    engine_weight_bytes,
    kv_token_bytes,
)
from megarl.planning.refit import engine_sizes
from megarl.rehearsal.need import Gpu
from megarl.rehearsal.own_process import OwnProcesses
from megarl.resharding.direct.quantised_shard import Quantisation
from megarl.resharding.direct.transfer_spec import check_traces, held_dtypes
from megarl.rollout import engine_configuration, engine_kind
from megarl.rollout.adapter_slot import with_adapter_slot
from megarl.rollout.kind import EngineKind
from megarl.rollout.number_format import in_number_format
from megarl.rollout.rehearsed_worker import RehearsedWorker
from megarl.schema import MegarlConfig, RolloutConfig


@dataclass(frozen=True)
class RehearsedEngine:
    """An engine, with the bytes of the worker that needs the most."""

    workers: int
    weights: int
    activations: int
    """Hidden states of a prefill, computed in closed form."""
    longest: int
    """KV cache of the longest sequence that the engine accepts."""
    longest_tokens: int
    data_parallel: int
    """Number of its workers with sequences of their own."""
    share: float
    """Fraction of a GPU that a worker takes."""
    traces: Sequence[LoadTrace]
    """Where each worker keeps the weights; empty if that could not be recorded."""
    why_not_direct: str = ""
    """Why weights cannot be planned to go directly into the engine; empty if they can."""
    computes_beside: bool = False
    """See `EngineKind.computes_beside`."""

    def room(self, gpu: Gpu) -> int:
        """Bytes of a worker's share for weights and KV cache."""
        return round(gpu.room * self.share) if self.computes_beside else gpu.room_of(self.share) - self.activations

    def taken(self, gpu: Gpu) -> int:
        """Bytes taken by a worker with its whole share."""
        return self.room(gpu) + self.activations

    def tokens(self, cache_bytes: int) -> int:
        """How many tokens fit into an engine whose workers have `cache_bytes` of KV cache each."""
        return max(0, cache_bytes * self.longest_tokens // self.longest) * self.data_parallel


def quantisation(rollout: RolloutConfig, dtype: torch.dtype) -> Quantisation | None:
    """The number format of the weights that engines get from a policy with this dtype."""
    chosen = number_format(rollout.weights)
    return None if chosen is None else Quantisation(chosen, dtype)


def check_engine(config: MegarlConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise UserError if a run or `rehearse_engine` would refuse the engine, without building it."""
    in_number_format(config.rollout, hf_config)
    architecture, adapter = read_architecture(hf_config), adapter_options(config.lora, config.loop.seed)
    check_cut(architecture.without_mtp, config.rollout)
    check_draft(architecture, config.rollout)
    if adapter is not None and not adapter.merge:
        with_adapter_slot(config.rollout, architecture, adapter.lora)
    rollout = engine_configuration(config)
    kind = engine_kind(rollout.engine)
    if _why_not_built(kind, rollout):
        kind.sizes(rollout.engine_args)


def rehearse_engine(
    config: MegarlConfig, hf_config: Mapping[str, Any], dtype: torch.dtype, gpu_bytes: int, processes: OwnProcesses
) -> RehearsedEngine:
    """Rehearse an engine for a policy trained in `dtype`, or compute its memory in closed form if that is not possible.

    Raises UserError if the engine itself refuses its arguments, or its sharding of the model.
    """
    architecture = read_architecture(hf_config).without_mtp
    rollout, adapter = engine_configuration(config), adapter_options(config.lora, config.loop.seed)
    # The adapter that goes alone, into a slot.
    lora = adapter.lora if adapter is not None and not adapter.merge else None
    if lora is not None:
        rollout = replace(rollout, engine_args=dict(with_adapter_slot(rollout, architecture, lora)))
    kind = engine_kind(rollout.engine)
    if reason := _why_not_built(kind, rollout):
        return _in_closed_form(config, rollout, architecture, lora, gpu_bytes, reason)
    chosen = quantisation(rollout, dtype)
    policy_dtypes = architecture.hf_dtypes(dtype)
    shapes = chosen.number_format.checkpoint(architecture)[0] if chosen else architecture.hf_shapes
    dtypes = held_dtypes(architecture, policy_dtypes, chosen)
    workers: list[RehearsedWorker] = processes.call(
        *_function(kind),
        {**hf_config, "dtype": dtype_name(dtype)},
        in_number_format(rollout, hf_config),
        shapes,
        dtypes,
    )
    traces = [worker.trace for worker in workers]
    check_traces(traces, dtypes)
    largest = max(workers, key=lambda worker: worker.weights + worker.longest)
    reasons, data_parallel = untraced(traces), len({worker.data_parallel for worker in workers})
    return RehearsedEngine(
        workers=len(workers),
        weights=largest.weights,
        activations=_activation_bytes(architecture, rollout, data_parallel),
        longest=largest.longest,
        longest_tokens=largest.longest_tokens,
        data_parallel=data_parallel,
        share=kind.memory_share(rollout.engine_args, gpu_bytes, architecture.multi_latent_attention),
        traces=() if reasons else traces,
        why_not_direct="".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:1]),
        computes_beside=kind.computes_beside,
    )


def _function(kind: EngineKind) -> tuple[str, str]:
    if kind.rehearsal is None:
        raise AssertionError(f"{kind.title} cannot be rehearsed")
    return kind.rehearsal


def _why_not_built(kind: EngineKind, rollout: RolloutConfig) -> str:
    """Why an engine cannot be built here; empty if it can."""
    if kind.rehearsal is None:
        return f"no worker of {kind.title} can be built without memory"
    if kind.drafts(rollout.engine_args):
        return f"the draft of {kind.title} cannot be built without memory"
    try:
        version(kind.packages["cpu"])
    except PackageNotFoundError:
        return f"{kind.packages['cpu']}, of which workers are built without a GPU, is not installed here"
    return ""


def _in_closed_form(
    config: MegarlConfig,
    rollout: RolloutConfig,
    architecture: Architecture,
    lora: Lora | None,
    gpu_bytes: int,
    reason: str,
) -> RehearsedEngine:
    kind = engine_kind(rollout.engine)
    sizes = kind.sizes(rollout.engine_args)
    parallel = engine_sizes(sizes.tensor, sizes.expert)
    chosen: NumberFormat | None = number_format(rollout.weights)
    data_parallel = parallel.world_size // parallel.tensor_model_parallel_size
    slot = adapter_slot_bytes(architecture, parallel, lora) if lora else 0
    tokens = kind.context(rollout.engine_args) or config.data.max_prompt_tokens + rollout.max_response_tokens
    return RehearsedEngine(
        workers=parallel.world_size,
        weights=round(engine_weight_bytes(architecture, parallel, chosen)) + slot,
        activations=_activation_bytes(architecture, rollout, data_parallel),
        longest=round(kv_token_bytes(architecture, parallel, sizes.kv_bytes, sizes.kv_ranks) * tokens),
        longest_tokens=tokens,
        data_parallel=data_parallel,
        share=kind.memory_share(rollout.engine_args, gpu_bytes, architecture.multi_latent_attention),
        traces=(),
        why_not_direct=reason,
        computes_beside=kind.computes_beside,
    )


def _activation_bytes(architecture: Architecture, rollout: RolloutConfig, data_parallel: int) -> int:
    kind, arguments = engine_kind(rollout.engine), rollout.engine_args
    cuts = kind.cuts(arguments)
    parts = cuts.matrices.parts, data_parallel, cuts.experts.parts
    return engine_activation_bytes(architecture, kind.prefill_tokens(arguments), *parts)
