"""One rank of the trainer, built from the real modules in a simulated world."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from megarl.rehearsal.fake_world import fake_rank  # first: it readies the process for Megatron

# isort: split
import torch
from torch import Tensor

from converters.architectures import Architecture, Head, read_architecture, with_head
from converters.errors import UserError
from converters.layouts.megatron import ModuleNames, megatron_layout
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.rehearsal.activations import ActivationBytes, MicroBatchSize, rehearse_micro_batch
from megarl.rehearsal.alive import Alive
from megatron_ext import compat
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.memory.offload import optimizer_tensors
from megatron_ext.optimizer.fully_sharded import own_rows
from megatron_ext.optimizer.hybrid_optimizer import host_tensors
from megatron_ext.options.device_fields import LOCAL, required_fields
from megatron_ext.options.options import MegatronOptions

_GATHERS = ("overlap_param_gather", "align_param_gather")
"""Options with which forward passes gather weights: torch (2.13) has no such collective for fake tensors."""
_OF_GPUS = ("transformer_impl", "moe_router_fusion")
"""Options of modules and kernels for GPUs, besides those that local modules need at another value."""


@dataclass(frozen=True)
class RankModel:
    """A model that Megatron ranks train, or only compute predictions with."""

    name: str
    """The role of its ranks."""
    hf_config: Mapping[str, Any]
    """Its config.json."""
    options: MegatronOptions
    head: Head = "language_model"
    reference: bool = False
    """Whether each rank keeps a copy of the initial weights."""
    is_frozen: bool = False
    """Whether it only computes predictions: no gradients, no optimizer."""

    def architecture(self) -> Architecture:
        """The architecture, as Megatron builds it."""
        return with_head(read_architecture(self.hf_config), self.head)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank's state. Megatron's buffers count whole, with their padding."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    """Main parameters and moments, as created by the first step."""
    reference: int = 0

    @property
    def total(self) -> int:
        """Sum of all of them."""
        return self.weights + self.gradients + self.optimizer + self.reference


@dataclass(frozen=True)
class RehearsedRank:
    """A rank that was built, and its memory in bytes."""

    rank: int
    tensors: int
    state: StateBytes
    predictions: int
    """Peak of activations in a forward-only pass."""
    activations: ActivationBytes | None
    """Activations of an update; None for a frozen model."""


def rehearse_ranks(rank_model: RankModel, ranks: Iterable[int], size: MicroBatchSize) -> list[RehearsedRank]:
    """Rehearse some ranks, one after the other. Raises UserError as `rehearse_rank` does."""
    return [rehearse_rank(rank_model, rank, size) for rank in ranks]


def rehearse_rank(rank_model: RankModel, rank: int, size: MicroBatchSize) -> RehearsedRank:
    """Build a rank as its worker does, compare its tensors with the layout, count its state, and run micro-batches.

    Raises UserError if a tensor is missing, unexpected, or of another shape or dtype than in the layout.
    """
    with fake_rank(rank_model.options.parallel, rank):
        model = build(rank_model, rank)
        state = state_bytes(model)
        # One counter for both, as tables that the first pass builds stay for the others.
        alive = Alive()
        predictions = rehearse_micro_batch(model, size, alive, backward=False)
        activations = None if rank_model.is_frozen else rehearse_micro_batch(model, size, alive, backward=True)
        return RehearsedRank(rank, len(model.local_tensors()), state, predictions.peak, activations)


def build(rank_model: RankModel, rank: int) -> MegatronModel:
    """Build the model of a rank, ready for its first step; see `TrainerWorker.build`."""
    # Local modules, whatever a run uses on its GPUs; and no gathers, which fake tensors do not support.
    of_gpus = {*_OF_GPUS, *required_fields({}, LOCAL)}
    transformer = {name: value for name, value in rank_model.options.transformer.items() if name not in of_gpus}
    distributed = {name: value for name, value in rank_model.options.distributed.items() if name not in _GATHERS}
    options = replace(rank_model.options, transformer=transformer, distributed=distributed)
    model = MegatronModel(read_architecture(rank_model.hf_config), options, rank, head=rank_model.head)
    names = model.module_names
    check_layout(model.local_tensors(), names, rank_model, rank_model.options.parallel.unsharded, rank)
    if rank_model.is_frozen:
        model.freeze()
        return model
    model.add_adapters()
    model.prepare_training(total_steps=1)
    of_adapter = model.adapters.tensors if model.adapters else {}
    weights = {name: tensor for name, tensor in model.local_tensors().items() if name not in of_adapter}
    check_layout(weights, names, rank_model, rank_model.options.parallel, rank)
    if rank_model.reference:
        model.keep_reference()
    compat.prime_optimizer_state(model.optimizer)
    return model


def check_layout(
    tensors: Mapping[str, Tensor], module_names: ModuleNames, rank_model: RankModel, parallel: ParallelSizes, rank: int
) -> None:
    """Raise UserError if a rank's tensors differ in name, shape or dtype from those in the layout of these sizes."""
    architecture, options = rank_model.architecture(), rank_model.options
    shard = megatron_layout(architecture, parallel, module_names=module_names).shard(rank)
    types = architecture.hf_dtypes(options.params_dtype)
    expected = {
        placement.local_name: (shard.local_shapes[placement.local_name], types[placement.hf_name])
        for placement in shard.placements
    }
    # FSDP2 gives the last ranks no rows of a parameter that has few.
    held = {
        name: (tuple(tensor.shape), tensor.dtype)
        for name, tensor in tensors.items()
        if tensor.numel() or not parallel.use_torch_fsdp2
    }
    for name in sorted(expected.keys() | held.keys()):
        if expected.get(name) != held.get(name):
            raise UserError(
                f"rank {rank} of {rank_model.name}: {name} is {_said(held.get(name))} in Megatron's modules and"
                f" {_said(expected.get(name))} in the layout that weights are converted by: correct the one that is"
                " wrong, converters/architectures or the installed megatron-core"
            )


def _said(found: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "not there" if found is None else f"{list(found[0])} of {str(found[1]).removeprefix('torch.')}"


def state_bytes(model: MegatronModel) -> StateBytes:
    """Memory of a model's state. An fp32 model's main parameters are views of its weights, and count there."""
    weights = _storages(model.local_tensors().values())
    if not model.chunks:
        return StateBytes(sum(weights.values()))
    gradients = _storages(list(_gradients(model)))
    optimizer = _storages(_no_step_counts(optimizer_tensors(model.optimizer)))
    reference = _storages(model.reference.tensors.values()) if model.reference else {}
    elsewhere = weights.keys() | _storages(_on_host(model)).keys()
    own = {key: size for key, size in optimizer.items() if key not in elsewhere}
    return StateBytes(*(sum(each.values()) for each in (weights, gradients, own, reference)))


def _gradients(model: MegatronModel) -> Iterator[Tensor]:
    """Megatron's gradient buffers or, with FSDP2, tensors like the optimizer's for a rank's rows."""
    if model.options.parallel.use_torch_fsdp2:
        for group in model.optimizer.param_groups:
            yield from (torch.empty_like(own_rows(each)) for each in group["params"])
        return
    for chunk in model.chunks:
        yield from (each.grad_data for each in (*chunk.buffers, *chunk.expert_parallel_buffers))


def _on_host(model: MegatronModel) -> Iterator[Tensor]:
    """Copies and state that `optimizer_cpu_offload` keeps in the host's memory."""
    for part in compat.parts(model.optimizer):
        yield from host_tensors(part.optimizer)


def _no_step_counts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Leave out Adam's step counts, which are scalars on the host."""
    return (tensor for tensor in tensors if tensor.dim())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Each storage of the tensors, once, and its bytes."""
    storages = (tensor.untyped_storage() for tensor in chain(tensors))
    return {storage._cdata: storage.nbytes() for storage in storages}
