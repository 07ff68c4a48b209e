"""The engines of a job: every worker of one is built of the engine's own modules, and its loader says where what lies.

Where that is not possible, an engine is counted in closed form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from converters.architectures import Architecture, read_architecture
from converters.dtypes import dtype_name
from converters.layouts.traced_layout import LoadTrace, untraced
from converters.number_formats import NumberFormat, number_format
from megarl.planning.memory.engine import engine_activation_bytes, engine_weight_bytes, engine_weights, kv_token_bytes
from megarl.planning.refit import engine_sizes
from megarl.rehearsal.need import Gpu
from megarl.rehearsal.own_process import call_apart
from megarl.resharding.direct.quantised_shard import Quantisation
from megarl.resharding.direct.transfer_spec import check_traces, held_dtypes
from megarl.rollout import engine_configuration, engine_kind
from megarl.rollout.kind import EngineKind
from megarl.rollout.number_format import in_number_format
from megarl.rollout.rehearsed_worker import RehearsedWorker
from megarl.schema import MegarlConfig, RolloutConfig


@dataclass(frozen=True)
class RehearsedEngine:
    """An engine, and bytes of the worker that needs most."""

    workers: int
    weights: int
    activations: int
    """Hidden states of a prefill, in closed form."""
    longest: int
    """Keys and values of the longest sequence that the engine takes."""
    longest_tokens: int
    data_parallel: int
    """How many of its workers have sequences of their own."""
    share: float
    """Share of a GPU that a worker takes."""
    traces: Sequence[LoadTrace]
    """Where each worker keeps the weights; none where that could not be recorded."""
    why_not_direct: str = ""
    """Why weights cannot be planned to go straight into the engine, if they cannot."""
    computes_beside: bool = False
    """See `EngineKind.computes_beside`."""

    def room(self, gpu: Gpu) -> int:
        """Bytes of a worker's share for weights, keys and values."""
        return round(gpu.room * self.share) if self.computes_beside else gpu.room_of(self.share) - self.activations

    def taken(self, gpu: Gpu) -> int:
        """Bytes of a worker with its whole share."""
        return self.room(gpu) + self.activations

    def tokens(self, cache_bytes: int) -> int:
        """How many tokens an engine keeps whose workers have so much for keys and values."""
        return max(0, cache_bytes * self.longest_tokens // self.longest) * self.data_parallel


def quantisation(rollout: RolloutConfig, dtype: torch.dtype) -> Quantisation | None:
    """The number format in which engines get the weights of a policy of this type."""
    chosen = number_format(rollout.weights)
    return None if chosen is None else Quantisation(chosen, dtype)


def check_engine(config: MegarlConfig, hf_config: Mapping[str, Any]) -> None:
    """Raise UserError for an engine that `rehearse_engine` would refuse before it builds anything."""
    in_number_format(config.rollout, hf_config)
    rollout = engine_configuration(config)
    kind = engine_kind(rollout.engine)
    if _why_not_built(kind, rollout):
        kind.sizes(rollout.engine_args)


def rehearse_engine(
    config: MegarlConfig, hf_config: Mapping[str, Any], dtype: torch.dtype, gpu_bytes: int
) -> RehearsedEngine:
    """Rehearse an engine of a policy that is trained in `dtype`, or count it in closed form where that is not possible.

    Raises UserError where the engine's arguments, or its cut of the model, are refused by the engine itself.
    """
    rollout = engine_configuration(config)
    kind = engine_kind(rollout.engine)
    architecture = read_architecture(hf_config).without_mtp
    if reason := _why_not_built(kind, rollout):
        return _in_closed_form(config, rollout, architecture, gpu_bytes, reason)
    chosen = quantisation(rollout, dtype)
    policy_dtypes = architecture.hf_dtypes(dtype)
    shapes = chosen.number_format.checkpoint(architecture)[0] if chosen else architecture.hf_shapes
    dtypes = held_dtypes(architecture, policy_dtypes, chosen)
    workers: list[RehearsedWorker] = call_apart(
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
    """Why an engine cannot be built here, if it cannot."""
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
    config: MegarlConfig, rollout: RolloutConfig, architecture: Architecture, gpu_bytes: int, reason: str
) -> RehearsedEngine:
    kind = engine_kind(rollout.engine)
    sizes = kind.sizes(rollout.engine_args)
    parallel = engine_sizes(sizes.tensor, sizes.expert)
    chosen: NumberFormat | None = number_format(rollout.weights)
    data_parallel = parallel.world_size // parallel.tensor_model_parallel_size
    tokens = kind.context(rollout.engine_args) or config.data.max_prompt_tokens + rollout.max_response_tokens
    return RehearsedEngine(
        workers=parallel.world_size,
        weights=round(engine_weight_bytes(engine_weights(architecture, parallel), chosen)),
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
    experts = kind.cuts(arguments).experts.parts
    return engine_activation_bytes(architecture, kind.prefill_tokens(arguments), data_parallel, experts)
