"""One model on this rank: weights, forward, train step, optimizer."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from converters.architectures import Architecture, Head, with_head
from converters.formats.safetensors import HuggingFaceCheckpoint
from converters.layouts.megatron import ModuleNames
from megatron_ext import compat, device
from megatron_ext.attention.context_parallel import cut
from megatron_ext.checkpoint.distributed_weights import load_distributed
from megatron_ext.delayed_scales import DelayedScales
from megatron_ext.forward import (
    Predict,
    forward,
    forward_backward,
    forward_backward_mtp,
    predict_labels,
    predict_nothing,
    predict_values,
)
from megatron_ext.log_probs import LogProbs
from megatron_ext.lora.adapters import Adapters, check_modules
from megatron_ext.memory.device_memory import StatePart
from megatron_ext.memory.offload import OffloadableState, optimizer_tensors
from megatron_ext.model.model import build_model, local_tensors
from megatron_ext.model.multi_token_prediction import prepare_layers
from megatron_ext.model.specs import module_names
from megatron_ext.objective import Objective, StepResult
from megatron_ext.optimizer.fully_sharded import all_finite, own_rows
from megatron_ext.optimizer.hybrid_optimizer import drop_gradients
from megatron_ext.optimizer.optimizer import Wrapped, build_optimizer, build_scheduler, wrap_distributed
from megatron_ext.optimizer.overlap import gather_weights, gathers_in_forward
from megatron_ext.options.options import MegatronOptions
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, last_tokens, pack, packed_order, unpack_all
from megatron_ext.packing.shared_prefixes import share
from megatron_ext.parallel import patient_barrier
from megatron_ext.reference import ReferenceWeights
from megatron_ext.routing.expert_load import ExpertLoad
from megatron_ext.routing.router import freeze_routers
from megatron_ext.routing.router_balance import RouterBalance, routed_tokens
from megatron_ext.routing.router_loss_options import RouterLosses
from megatron_ext.routing.router_replay import take_counts
from megatron_ext.weights import export_huggingface, load_huggingface

M = TypeVar("M")
P = TypeVar("P")


class MegatronModel:
    """This rank's part of a model, and all operations on it.

    `head` says what the model computes from its last hidden states. The argument `architecture` describes a language
    model, whose backbone a value model uses; the attribute `architecture` describes this model.

    Every method is collective: all ranks of the model call it with the same arguments, except for the batch, where each
    data-parallel rank gets its own part.
    """

    def __init__(
        self, architecture: Architecture, options: MegatronOptions, rank: int, *, head: Head = "language_model"
    ) -> None:
        self.architecture = with_head(architecture, head)
        self.options = options
        self.rank = rank
        self.bare_chunks = build_model(
            self.architecture,
            options.parallel,
            params_dtype=options.params_dtype,
            overrides=options.transformer,
            fp32_logits=options.fp32_logits,
            shared_prefixes=options.shared_prefixes,
            mtp_is_detached=options.mtp_training == "detached",
        )
        """Model chunks of this rank, one per virtual pipeline stage, not wrapped for data parallelism."""
        if options.adapter is not None:
            check_modules(self.module_names)  # before all weights are read
        self.trained_mtp_layers = 0 if options.mtp_training == "none" else self.architecture.mtp_layers
        """Number of layers for multi-token prediction that train."""
        self.reference: ReferenceWeights | None = None
        """Set by `keep_reference`."""
        self.adapters: Adapters | None = None
        """Set by `add_adapters`."""
        self._weights_are_complete = True
        self._scales = DelayedScales(self.bare_chunks, options)
        self.chunks: Sequence[Wrapped] = []
        """The chunks wrapped for data parallelism; empty before `prepare_training`."""
        self.residence = OffloadableState(self._weight_tensors)
        """Tracks which parts of the state are on the device; at first all are."""
        self._wait_for_reader: Callable[[], None] | None = None

    @property
    def module_names(self) -> ModuleNames:
        """The naming scheme of `local_tensors`."""
        return module_names(self.bare_chunks[0].config)

    def local_tensors(self) -> dict[str, Tensor]:
        """This rank's weights by the names of its Megatron layout: the tensors that train steps change.

        A caller that keeps them must call `complete_weights` before each read.
        """
        self.complete_weights()
        return local_tensors(self.bare_chunks)

    def complete_weights(self) -> None:
        """Give every rank all weights of the last train step.

        With `overlap_param_gather` each data-parallel rank has only its own part after a step. The next forward pass
        gathers the others, so that the gather overlaps; every other reader must call this.
        """
        self.residence.require("weights")
        if not self._weights_are_complete:
            gather_weights(self.chunks)
            self._weights_are_complete = True

    def lend_state(self, wait: Callable[[], None]) -> None:
        """Lend weights and training state to a concurrent reader: `wait` is called once before they change."""
        self.take_state_back()
        self._wait_for_reader = wait

    def take_state_back(self) -> None:
        """Wait until the state that was lent is no longer read."""
        wait, self._wait_for_reader = self._wait_for_reader, None
        if wait is not None:
            wait()

    def load_huggingface(self, checkpoint: HuggingFaceCheckpoint) -> None:
        """Read this rank's boxes of a HuggingFace checkpoint; call before `prepare_training`."""
        load_huggingface(self.bare_chunks, self.architecture, self.options.parallel, self.rank, checkpoint)

    def load_distributed(self, folder: Path) -> None:
        """Read this rank's part of a torch_dist checkpoint of any layout; call before `prepare_training`."""
        load_distributed(self.bare_chunks, self.architecture, folder)

    def add_adapters(self) -> None:
        """Freeze the weights and put adapters beside them, if the options ask for any; between loading and training."""
        options = self.options.adapter
        if options is None:
            return
        self.adapters = Adapters(self.bare_chunks, self.architecture, options.lora, self.options.parallel, self.rank)
        if options.path is None:
            self.adapters.initialise(options.seed)
        else:
            self.adapters.load(options.path)

    def trained_weights(self, names: Collection[str] | None = None) -> AbstractContextManager[None]:
        """Context in which `local_tensors` hold the trained weights, with adapters merged into them.

        `names` are the tensors to be read; None means all.
        """
        return self.adapters.merged(names) if self.adapters else nullcontext()

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters in PEFT's format; the model has some."""
        assert self.adapters is not None
        self.complete_weights()
        with patient_barrier() as barrier:
            self.adapters.export(folder, barrier)

    def export_huggingface(self, folder: Path, copy_from: Path) -> None:
        """Write the weights as a HuggingFace checkpoint, with config and tokenizer taken from `copy_from`."""
        self.complete_weights()
        with patient_barrier() as barrier, self.trained_weights():
            export_huggingface(
                self.bare_chunks, self.architecture, self.options.parallel, self.rank, folder, copy_from, barrier
            )

    def prepare_training(self, total_steps: int) -> None:
        """Wrap the model for data parallelism and make its optimizer and schedule of `total_steps` optimizer steps."""
        options = self.options
        if options.freeze_moe_router:
            freeze_routers(self.bare_chunks)
        prepare_layers(self.bare_chunks, options.mtp_training)
        self.chunks = wrap_distributed(
            self.bare_chunks, options.distributed, fully_sharded=options.parallel.use_torch_fsdp2
        )
        self.optimizer: MegatronOptimizer = build_optimizer(self.chunks, options.optimizer, options.params_dtype)
        self.scheduler = build_scheduler(self.optimizer, options.optimizer, options.scheduler, total_steps)
        for chunk in self.chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
        self._expert_load = ExpertLoad(self.bare_chunks, self.architecture.num_layers)
        self._balance = RouterBalance(self.bare_chunks, RouterLosses.of(options.transformer))
        self.residence = OffloadableState(self._weight_tensors, self._training_tensors, self.chunks)
        # Buffers start in the state after a step: the next forward pass gathers the weights.
        self._weights_are_complete = not gathers_in_forward(self.chunks)
        if options.parallel.use_torch_fsdp2 or options.steps_on_host:
            # Transformer Engine's Adam, up to 2.11, would create moments of all rows in its first step. A partly
            # offloaded optimizer only reveals its main parameters on the GPU with its state.
            compat.prime_optimizer_state(self.optimizer)

    def freeze(self) -> None:
        """Use instead of `prepare_training` for a model that is not trained: no gradients, optimizer or buffers."""
        for chunk in self.bare_chunks:
            chunk.eval().requires_grad_(False)

    def offload(self, parts: Collection[StatePart]) -> None:
        """Move parts of the state to the host until `reload`; methods that need them raise RuntimeError."""
        self.take_state_back()
        if self.residence.has("weights"):
            self.complete_weights()
        if "training" in parts and self.chunks:
            self.optimizer.zero_grad()
        if "weights" in parts:
            compat.drop_quantised_weights(self.bare_chunks)
            compat.drop_rotary_tables()
            compat.drop_routes_of_tokens(self.bare_chunks)
        self.residence.offload(parts)

    def reload(self, parts: Collection[StatePart]) -> None:
        """Move parts of the state back to the device. Raises DeviceFullError if they do not fit."""
        self.residence.reload(parts)

    def log_probs(
        self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> LogProbs | None:
        """Log-probability, entropy and greediness of every token of `batch`, in its own order; 0 for first tokens.

        `micro_batches` lists the sequences of each micro-batch. None on all but the last pipeline stage.
        """
        packed, predictions = self._forward(batch, micro_batches, predict_labels(temperature))
        if not predictions:
            return None
        found = {field.name: [getattr(each, field.name) for each in predictions] for field in fields(LogProbs)}
        return LogProbs(**{name: unpack_all(each, packed, batch, micro_batches) for name, each in found.items()})

    def values(self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]]) -> Tensor | None:
        """float32[T]: for each token of `batch` the value of the state in which it was chosen; 0 for first tokens.

        Needs a model with a value head. None on all but the last pipeline stage.
        """
        packed, values = self._forward(batch, micro_batches, predict_values)
        return unpack_all(values, packed, batch, micro_batches) if values else None

    def scores(self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]]) -> Tensor | None:
        """float32[N]: the value at the last token of each sequence of `batch`.

        Needs a model with a value head. None on all but the last pipeline stage.
        """
        packed, values = self._forward(batch, micro_batches, predict_values)
        if not values:
            return None
        scores = [each[last_tokens(micro_batch)] for each, micro_batch in zip(values, packed, strict=True)]
        return torch.cat(scores).cpu()[packed_order(micro_batches).argsort()]

    def train_step(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        objective: Objective[Any, M],
        *,
        temperature: float = 1.0,
    ) -> StepResult[M]:
        """Run one optimizer step on `batch`. Logits are divided by `temperature`; a value model has none.

        Raises RuntimeError if a gradient is not finite: before a weight changes or, with `check_for_nan_in_grad` off,
        where only the norm shows it, afterwards.
        """
        self.residence.require("weights", "training")
        self.take_state_back()
        learning_rate = self._learning_rate()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        packed = self._packed_micro_batches(batch, micro_batches, are_counted=True)
        counting = self._balance.step(batch.lengths, lambda: forward(self.bare_chunks, packed, predict_nothing))
        with counting, self._expert_load.step():
            if self.trained_mtp_layers:
                metrics, mtp = forward_backward_mtp(
                    self.chunks, packed, batch, objective, layers=self.trained_mtp_layers, temperature=temperature
                )
            elif self.architecture.head == "value":
                metrics, mtp = forward_backward(self.chunks, packed, objective, predict_values), None
            else:
                metrics, mtp = forward_backward(self.chunks, packed, objective, predict_labels(temperature)), None
        gradient_norm = self._step_optimizer()
        experts = self.chunks[0].config.num_moe_experts
        load = self._expert_load.take(experts, device.device()) if experts else None
        replayed = None if batch.routed_experts is None else self._replayed()
        self.residence.count()
        losses = self._balance.take()
        return StepResult(
            metrics=metrics,
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            expert_load=load,
            replayed=replayed,
            mtp=mtp,
            router_losses=losses,
        )

    def _step_optimizer(self) -> float:
        """Update the weights. Returns the gradient norm before clipping; raises as `train_step`."""
        if self.options.parallel.use_torch_fsdp2 and not all_finite(self.chunks):
            raise RuntimeError("a gradient is not a number, or infinite: no weight was changed")
        updated, gradient_norm, _ = self.optimizer.step()
        for part in compat.parts(self.optimizer):
            drop_gradients(part.optimizer)
        self._weights_are_complete = not gathers_in_forward(self.chunks)
        if not updated:
            raise RuntimeError("the optimizer skipped its step: the gradients overflowed")
        if not isfinite(gradient_norm):
            raise RuntimeError(
                f"the norm of the gradients is {gradient_norm}, and with megatron.check_for_nan_in_grad=false the"
                " weights were changed nevertheless: go on from the last checkpoint"
            )
        self.scheduler.step(increment=1)
        return float(gradient_norm)

    def _replayed(self) -> Tensor:
        counts = take_counts(self.chunks, device.device())
        dist.all_reduce(counts)
        return counts.cpu()

    def _learning_rate(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def keep_reference(self) -> None:
        """Keep a copy of the present weights as the reference model; with adapters that is the base model itself."""
        if self.adapters is None:
            if self.options.parallel.use_torch_fsdp2 and not self.chunks:
                raise RuntimeError("FSDP2 has not cut the weights yet: prepare_training comes before keep_reference")
            self.reference = ReferenceWeights(self.local_tensors())

    def refresh_reference(self) -> None:
        """Copy the present weights to the reference model; checkpoints then include them."""
        self.take_state_back()
        self._kept_reference().refresh(self.local_tensors())

    def reference_weights(self) -> AbstractContextManager[None]:
        """Context in which the model computes with the reference weights."""
        if self.adapters is not None:
            return self.adapters.off()
        self.take_state_back()
        return self._kept_reference().exchanged(self.local_tensors())

    def _kept_reference(self) -> ReferenceWeights:
        if self.reference is None:
            raise RuntimeError("keep_reference was never called")
        return self.reference

    def _weight_tensors(self) -> Iterator[Tensor]:
        for chunk in self.bare_chunks:
            yield from map(own_rows, chunk.parameters())
            yield from chunk.buffers()

    def _training_tensors(self) -> Iterator[Tensor]:
        yield from optimizer_tensors(self.optimizer)
        if self.reference is not None:
            yield from self.reference.tensors.values()

    def _forward(
        self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], predict: Predict[P]
    ) -> tuple[list[MicroBatch], list[P]]:
        """The micro-batches, and the predictions of each; none of these on all but the last pipeline stage."""
        packed = self._packed_micro_batches(batch, micro_batches)
        return packed, forward(self.bare_chunks, packed, predict)

    def _packed_micro_batches(
        self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], *, are_counted: bool = False
    ) -> list[MicroBatch]:
        """`micro_batches_of` the arguments, after making sure that delayed scales exist; collective."""
        packed = self.micro_batches_of(batch, micro_batches, are_counted=are_counted)
        self._scales.learn(packed)
        return packed

    def micro_batches_of(
        self, batch: RaggedBatch, micro_batches: Sequence[Sequence[int]], *, are_counted: bool = False
    ) -> list[MicroBatch]:
        """This rank's micro-batches of `batch`; `micro_batches` lists the sequences of each.

        With `are_counted` they also hold `routed`, the tokens that routers see, as in a train step.
        """
        self.residence.require("weights")
        config = self.bare_chunks[0].config
        packed = [self._packed(batch, sequences) for sequences in micro_batches]
        if are_counted and config.num_moe_experts:
            split = config.sequence_parallel
            packed = [replace(each, routed=routed_tokens(each, sequence_parallel=split)) for each in packed]
        return [each.to(device.device()) for each in packed]

    def _packed(self, batch: RaggedBatch, sequences: Sequence[int]) -> MicroBatch:
        parallel, align = self.options.parallel, self.options.token_multiple
        if self.options.shared_prefixes:
            whole = pack(batch, sequences)
            return replace(whole, part=share(whole, align))
        if parallel.context_parallel_size == 1:
            return pack(batch, sequences, align)
        whole, rank = pack(batch, sequences), parallel.coordinates(self.rank).context
        return replace(whole, part=cut(whole, parallel.context_parallel_size, rank, align))
