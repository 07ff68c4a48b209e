"""Predicts a whole step: memory of trainer and engines, seconds of each stage, and whether it fits."""

from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

from converters.architectures import Architecture
from converters.cost.devices import Device
from megarl.planning.amounts import say_bytes
from megarl.planning.memory.engine import EngineMemory, engine_memory
from megarl.planning.memory.trainer import TrainerMemory, TrainingOptions, trainer_memory
from megarl.planning.refit import PlannedRefit
from megarl.planning.step.rollout import Decoding, rollout_seconds
from megarl.planning.step.speeds import EXCHANGE_S, Speeds
from megarl.planning.step.training import Training
from megarl.planning.workload import Workload

_SPARE = 0.06
"""Share of a GPU that a trainer leaves free for the CUDA context, NCCL's buffers and allocator fragmentation."""


@dataclass(frozen=True)
class EngineOptions:
    """An engine's own options that affect memory and time."""

    utilization: float = 0.9
    """Share of a GPU that the engine uses: vLLM's `gpu_memory_utilization`."""
    is_eager: bool = False
    kv_bytes: int = 2
    """Bytes per element of keys and values."""
    kv_ranks: int = 1
    """Ranks that share the tokens of keys and values: vLLM's `decode_context_parallel_size`."""
    prefill_tokens: int = 16384
    """Prompt tokens computed at once: vLLM's `max_num_batched_tokens`."""
    most_samples: float = inf
    """Samples that each attention data-parallel group computes at once: vLLM's `max_num_seqs`."""
    computes_beside: bool = False
    """See `EngineKind.computes_beside`."""


@dataclass(frozen=True)
class PlannedStep:
    """A step to predict: sizes, work and device. Trainer and engines take turns if they are colocated."""

    refit: PlannedRefit
    workload: Workload
    device: Device
    training: TrainingOptions = field(default_factory=TrainingOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    staleness: int = 0
    """How many versions old a trained token may be."""
    sends_whole_tensors: bool = False
    """Refits use the engines' own loader (`refit.path=loader`), which gets every tensor whole."""
    refit_seconds: float | None = None
    """Seconds for moving a refit's bytes if they have been replayed; else the time of an engine's NIC is used."""
    staged_bytes: int = 0
    """Values that an engine's rank stages for a refit, if its bytes have been counted; they stay on the GPU."""
    predicting: Architecture | None = None
    """The trainer's model if it has multi-token-prediction layers, which no refit moves."""

    @property
    def held(self) -> Architecture:
        """The trainer's model."""
        return self.predicting or self.refit.architecture

    @property
    def overlaps(self) -> bool:
        """Whether engines generate while the trainer trains."""
        return self.staleness > 0 and not self.refit.colocated


@dataclass(frozen=True)
class StepPrediction:
    """Memory and seconds of a step. Bytes are per GPU."""

    step: PlannedStep

    @cached_property
    def trainer_memory(self) -> TrainerMemory:
        """Memory of the pipeline stage that needs most."""
        refit, workload = self.step.refit, self.step.workload
        ranks = refit.trainer.data_parallel_size
        return max(
            trainer_memory(
                self.step.held,
                refit.trainer,
                self.step.training,
                micro_batch_tokens=workload.micro_batch_tokens(ranks),
                micro_batches=workload.micro_batches(ranks),
            ),
            key=lambda each: each.total,
        )

    @cached_property
    def engine_memory(self) -> EngineMemory:
        """Memory of every rank; all need the same."""
        refit = self.step.refit
        return engine_memory(
            refit.engine_architecture,
            refit.engine,
            refit.number_format,
            memory_bytes=self.step.device.memory_bytes,
            utilization=self.step.engine.utilization,
            prefill_tokens=self.step.engine.prefill_tokens,
            kv_bytes=self.step.engine.kv_bytes,
            kv_ranks=self.step.engine.kv_ranks,
            computes_beside=self.step.engine.computes_beside,
        )

    @property
    def bucket_bytes(self) -> int:
        """Refit buckets on a trainer's GPU, including those of a colocated engine; they are never freed."""
        refit = self.step.refit
        return refit.buckets * refit.bucket_bytes * (2 if refit.colocated else 1)

    @property
    def trainer_bytes(self) -> int:
        """Memory of a trainer's rank, and what refits have on its GPU."""
        return self.trainer_memory.total + self._refit_bytes

    @property
    def trainer_room(self) -> int:
        """Free bytes on a trainer's GPU; if negative, the missing bytes."""
        return round(self.step.device.memory_bytes * (1 - _SPARE)) - self.trainer_bytes

    @property
    def engine_room(self) -> int:
        """Bytes of the KV cache that are left beside one response of the maximum length."""
        workload = self.step.workload
        longest = workload.prompt_tokens + workload.max_response_tokens
        return self.engine_memory.kv_cache - round(longest * self.engine_memory.kv_token)

    @property
    def refit_room(self) -> int:
        """Free bytes on a GPU while it holds the weights of trainer and engine, and the buckets of both."""
        if not self.step.refit.colocated:
            return 0
        held = self.trainer_memory.weights + self.engine_memory.weights + self._refit_bytes
        return round(self.step.device.memory_bytes * (1 - _SPARE)) - held

    @property
    def rollout_room(self) -> int:
        """Free bytes on an engine's GPU beside the engine's share, which does not cover buckets and staged values."""
        engine = self.engine_memory
        share = engine.weights + engine.working + max(0, engine.kv_cache)
        return round(self.step.device.memory_bytes) - share - self.bucket_bytes - self.step.staged_bytes

    @property
    def _refit_bytes(self) -> int:
        """Buckets and staged values on a trainer's GPU."""
        return self.bucket_bytes + (self.step.staged_bytes if self.step.refit.colocated else 0)

    @property
    def host_bytes(self) -> tuple[int, int]:
        """Peak pinned host memory for the state that a trainer rank, and an engine rank, move off their GPU in turns.

        vLLM copies each segment of its weights, and torch rounds each copy up to a power of two. State that
        `optimizer_cpu_offload` keeps on the host permanently is not counted.
        """
        memory = self.trainer_memory
        return memory.weights + memory.optimizer + memory.reference, 2 * self.engine_memory.weights

    @property
    def fits(self) -> bool:
        """Whether trainer and engine fit and, if they take turns, also the weights of both together."""
        return min(self.trainer_room, self.engine_room, self.refit_room, self.rollout_room) >= 0

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Name of a stage -> its seconds."""
        found = {"rollout": self.rollout_seconds, **self.training_seconds, "refit": self._refit_seconds()}
        return found | ({"turns": self._turn_seconds()} if self.step.refit.colocated else {})

    @cached_property
    def rollout_seconds(self) -> float:
        """Seconds of the engines' stage, which do not depend on the trainer."""
        return rollout_seconds(self._decoding, self.step.workload, self.step.refit.replicas)

    @cached_property
    def training_seconds(self) -> dict[str, float]:
        """Seconds of the trainer's stages, which do not depend on the engines."""
        step = self.step
        trained = step.held if step.training.predicts else step.held.without_mtp
        training = Training(trained, step.refit.trainer, step.training, self._speeds, step.workload)
        return {"log_probs": training.log_prob_seconds, "update": training.update_seconds}

    @property
    def step_seconds(self) -> float:
        """Seconds of all stages in sequence; rollout and training may overlap, but a refit interrupts both."""
        seconds = self.seconds
        if not self.step.overlaps:
            return sum(seconds.values())
        trained = sum(self.training_seconds.values())
        return max(seconds["rollout"], trained) + seconds["refit"]

    def why_not(self) -> str | None:
        """Describe what is missing where, and how to reduce it; None if the step fits."""
        short: list[str] = []
        if self.trainer_room < 0:
            parts = self.trainer_memory.parts
            most = max(parts, key=lambda name: parts[name])
            short.append(
                f"a trainer's rank needs {say_bytes(self.trainer_bytes)}, {say_bytes(-self.trainer_room)} too much, and"
                f" most of it is {most}: {_helps(most, self.step)}"
            )
        if self.engine_room < 0:
            smaller = ", or give --engine-dtype fp8" if self.step.refit.number_format is None else ""
            short.append(
                f"an engine's rank lacks {say_bytes(-self.engine_room)} for its weights and one longest response: raise"
                f" --engine-tp or --engine-ep{smaller}"
            )
        if self.refit_room < 0:
            short.append(
                f"a refit lacks {say_bytes(-self.refit_room)} for the weights of trainer and engine on one GPU, and"
                " their buckets: raise --engine-tp, --engine-ep, --tp or --pp, or lower --bucket-bytes"
            )
        if self.rollout_room < 0 <= self.engine_room:
            staged = f"{say_bytes(self.step.staged_bytes)} of values in split blocks" if self.step.staged_bytes else ""
            short.append(
                f"a GPU lacks {say_bytes(-self.rollout_room)} beside an engine's share of it for the refit's buckets"
                f"{' and ' + staged if staged else ''}: lower the share in rollout.engine_args, --bucket-bytes"
                f"{', --tp or --etp' if staged else ''}"
            )
        return "; and ".join(short) or None

    @property
    def _speeds(self) -> Speeds:
        return Speeds(self.step.device, self.step.refit.cluster)

    @property
    def _decoding(self) -> Decoding:
        refit = self.step.refit
        return Decoding(
            refit.engine_architecture,
            refit.engine,
            refit.number_format,
            self.engine_memory,
            self._speeds,
            self.step.engine.is_eager,
            self.step.engine.most_samples * self.engine_memory.attention_ranks,
        )

    def _refit_seconds(self) -> float:
        """Seconds for moving the bytes, and for the engine's pause."""
        if self.step.refit_seconds is not None:
            return self.step.refit_seconds + EXCHANGE_S
        nbytes = self.engine_memory.weights
        if self.step.sends_whole_tensors:
            shapes = self.step.refit.architecture.hf_shapes.values()
            nbytes = self.step.training.weight_bytes * sum(map(prod, shapes))
        return self._speeds.send(nbytes) + EXCHANGE_S

    def _turn_seconds(self) -> float:
        """Seconds for moving all state of colocated trainer and engine to the host and back, once per step."""
        memory = self.trainer_memory
        away = memory.weights + memory.optimizer + memory.reference
        return self._speeds.host(2 * (away + self.engine_memory.weights))


def _helps(part: str, step: PlannedStep) -> str:
    """The knobs that reduce a part of a trainer's memory."""
    if part in ("activations", "working"):
        again = "" if step.training.recompute.is_full else "recompute layers (--recompute full), "
        return f"{again}lower --micro-batch-tokens, or raise --cp or --tp"
    if part == "gathered":
        return "raise --tp, which cuts the layers that FSDP2 gathers"
    if step.refit.trainer.use_torch_fsdp2:
        return "raise --tp or the number of GPUs"
    host = "; or keep optimizer state on the host (megatron.optimizer_cpu_offload)" if part == "optimizer" else ""
    return f"raise --pp, --tp, --ep or the number of GPUs{host}"
