"""Program of the ranks: one process computes what all layouts have to; then many layouts, one after another."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from batches import bare_batch, deal, with_fields
from combinations import KINDS, Layout, Size
from megatron.core import parallel_state
from parallel_rank import share_of
from reference import TEMPERATURE, Outcome, objective, open_model, options
from torch import Tensor

from converters.layout import Placement
from converters.layouts.megatron import ParallelSizes, megatron_layout
from megarl.algorithms import Metrics, PolicyObjective
from megatron_ext import parallel
from megatron_ext.log_probs import LogProbs
from megatron_ext.megatron_model import MegatronModel
from megatron_ext.packing.packing import MicroBatch, RaggedBatch, unpack

WHOLE = ("dense", "MoE, alltoall")
"""Kinds that are also run forward alone, and without the distributed optimizer: neither sees how attention or the
dispatch of tokens is computed."""
SMALLEST_SCALE = 1e-2
"""A gradient is compared relative to the largest of its tensor, or to this share of the largest of the model."""


class ModelKey(NamedTuple):
    """A model of the table."""

    kind: str
    size: Size


@dataclass(frozen=True)
class Reference:
    """A model, its batch, and what one process makes of it."""

    folder: Path
    batch: RaggedBatch
    outcome: Outcome


@dataclass(frozen=True)
class Differences:
    """How far a layout is from one process."""

    log_probs: float
    """Largest of all tokens, of entropies too."""
    loss: float
    gradients: float
    """Largest of all tensors, each relative to its largest element."""
    gradient_norm: float
    """Relative."""
    weights: float
    """Largest of all elements, after a step."""

    @property
    def largest(self) -> float:
        return max(astuple(self))


def references(rank: int, sizes: ParallelSizes, folders: Mapping[ModelKey, Path]) -> dict[ModelKey, Reference]:
    """The results of one process for each model, prefixes of sequences computed for each of them."""
    return {key: _reference(sizes, key, folder) for key, folder in folders.items()}


def _reference(sizes: ParallelSizes, key: ModelKey, folder: Path) -> Reference:
    kind = KINDS[key.kind]
    chosen = options(kind, sizes, distributed_optimizer=True, shared_prefixes=False)
    model, bare = open_model(kind, folder, 0, chosen), bare_batch(shared_prefixes=kind.shared_prefixes)
    cut = deal(bare, sizes, chosen.micro_batch_multiple, shared_prefixes=False)[0]
    predictions = model.log_probs(bare, cut, temperature=TEMPERATURE)
    assert predictions is not None
    batch = with_fields(bare, predictions.log_probs)
    placements = _placements(model, 0)
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        gradients.update(_in_huggingface_names(model, placements, _gradients(model)))

    loss, norm, _ = _step(model, batch, cut, keep)
    weights = _in_huggingface_names(model, placements, model.local_tensors())
    return Reference(folder, batch, Outcome(predictions, loss, norm, gradients, weights))


def compare(
    rank: int, sizes: ParallelSizes, kind: str, layouts: Sequence[Layout], found: Mapping[ModelKey, Reference]
) -> list[Differences]:
    """The differences of each layout, all of them of as many processes as the job has, from one process."""
    results = []
    with _one_group_of_the_same_ranks():
        for layout in layouts:
            parallel.initialize(layout.sizes, rank, "")
            results.append(_compare(rank, layout, kind, found[ModelKey(kind, layout.model)]))
            parallel_state.destroy_model_parallel()
    return results


@contextmanager
def _one_group_of_the_same_ranks() -> Iterator[None]:
    """Inside, a group of the same ranks is made once: each has three threads, and a layout has two dozen groups."""
    new_group, destroy = dist.new_group, dist.destroy_process_group
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            destroy(group)
    groups: dict[tuple[int, ...] | None, dist.ProcessGroup] = {}

    def kept(ranks: Sequence[int] | None = None, **described: Any) -> dist.ProcessGroup:
        key = None if ranks is None else tuple(ranks)
        if key not in groups:
            groups[key] = new_group(ranks, **described)
        return groups[key]

    dist.new_group, dist.destroy_process_group = kept, lambda *_groups: None
    try:
        yield
    finally:
        dist.new_group, dist.destroy_process_group = new_group, destroy


def _compare(rank: int, layout: Layout, kind: str, reference: Reference) -> Differences:
    try:
        found = [_differences(rank, layout, kind, reference, distributed_optimizer=True)]
        if kind in WHOLE:
            found.append(_differences(rank, layout, kind, reference, distributed_optimizer=False))
    except BaseException as error:
        error.add_note(f"{kind}: {layout}")
        raise
    worst = torch.tensor([astuple(each) for each in found], dtype=torch.float64).nan_to_num(nan=math.inf).amax(0)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return Differences(*worst.tolist())


def _differences(
    rank: int, layout: Layout, kind: str, reference: Reference, *, distributed_optimizer: bool
) -> Differences:
    shared = KINDS[kind].shared_prefixes
    chosen = options(KINDS[kind], layout.sizes, distributed_optimizer=distributed_optimizer, shared_prefixes=shared)
    model, expected = open_model(KINDS[kind], reference.folder, rank, chosen), reference.outcome
    ranks = deal(reference.batch, layout.sizes, chosen.micro_batch_multiple, shared_prefixes=shared)
    cut = ranks[layout.sizes.data_parallel_rank(rank)]
    off_predictions = [0.0]
    if not distributed_optimizer:
        found = model.log_probs(reference.batch, cut, temperature=TEMPERATURE)
        in_order = sorted(index for sequences in cut for index in sequences)
        off_predictions += _prediction_distances([found] if found else [], [in_order], reference)

    off_gradients, placements = [0.0], _placements(model, rank)

    def look() -> None:
        local = _gradients(model)
        largest = max(float(each.abs().max()) for each in expected.gradients.values())
        for name, whole in expected.gradients.items():
            scale = max(float(whole.abs().max()), SMALLEST_SCALE * largest)
            here = [each for each in placements if each.hf_name == name and each.local_name in local]
            off_gradients.extend(each / scale for each in _distances(here, local, whole))

    loss, norm, predictions = _step(model, reference.batch, cut, look)
    weights = model.local_tensors()
    return Differences(
        log_probs=_worst(off_predictions + _prediction_distances(predictions, cut, reference)),
        loss=abs(_summed(loss if layout.sizes.holds_predictions(rank) else 0.0) - expected.loss),
        gradients=_worst(off_gradients),
        gradient_norm=abs(norm / expected.gradient_norm - 1),
        weights=_worst(
            distance for each in placements for distance in _distances([each], weights, expected.weights[each.hf_name])
        ),
    )


@dataclass(frozen=True)
class _Listening:
    """An objective that keeps the predictions of each micro-batch."""

    objective: PolicyObjective
    heard: list[LogProbs]

    def __call__(self, predictions: LogProbs, micro_batch: MicroBatch) -> tuple[Tensor, Metrics]:
        self.heard.append(predictions.mapped(lambda values: unpack(values.detach(), micro_batch)))
        return self.objective(predictions, micro_batch)


def _step(
    model: MegatronModel, batch: RaggedBatch, cut: Sequence[Sequence[int]], look: Callable[[], None]
) -> tuple[float, float, list[LogProbs]]:
    """One train step: this rank's loss, the norm of the gradient, and the predictions of each micro-batch.

    `look` is called before the optimizer's step.
    """
    optimizer_step = model.optimizer.step

    def step() -> Any:
        _complete_gradients(model)
        look()
        return optimizer_step()

    model.optimizer.step = step
    listening = _Listening(objective(), [])
    # A rank gets its share of the sequences, of which it counts what all ranks' losses are divided by.
    own, places = share_of(cut)
    result = model.train_step(batch.select(own), places, listening, temperature=TEMPERATURE)
    loss = Metrics.merge(result.metrics).sums["policy/loss"] if result.metrics else 0.0
    return float(loss), result.gradient_norm, listening.heard


def _complete_gradients(model: MegatronModel) -> None:
    """Give each rank the whole gradients of its weights: the distributed optimizer leaves it a share of them."""
    if not model.chunks[0].ddp_config.use_distributed_optimizer:
        return
    for group in (g for chunk in model.chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            share = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, share, group=ranks)


def _gradients(model: MegatronModel) -> dict[str, Tensor]:
    tensors = model.local_tensors()
    return {name: tensor.main_grad for name, tensor in tensors.items() if hasattr(tensor, "main_grad")}


def _placements(model: MegatronModel, rank: int) -> Sequence[Placement]:
    return megatron_layout(model.architecture, model.options.parallel, module_names="local").shard(rank).placements


def _in_huggingface_names(
    model: MegatronModel, placements: Sequence[Placement], local: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    whole = {name: torch.zeros(shape) for name, shape in model.architecture.hf_shapes.items()}
    for each in placements:
        if each.local_name in local:
            whole[each.hf_name][each.hf_box.slices()] = local[each.local_name].detach()[each.local_box.slices()]
    return whole


def _worst(values: Iterable[float]) -> float:
    """The largest, which a NaN is: Python's `max` would leave it out."""
    return float(torch.tensor(list(values)).nan_to_num(nan=math.inf).max())


def _distances(placements: Sequence[Placement], local: Mapping[str, Tensor], whole: Tensor) -> list[float]:
    return [
        float((local[each.local_name].detach()[each.local_box.slices()] - whole[each.hf_box.slices()]).abs().max())
        for each in placements
    ]


def _prediction_distances(
    predictions: Sequence[LogProbs], cut: Sequence[Sequence[int]], reference: Reference
) -> list[float]:
    """How far predictions of trained tokens are off, by micro-batch of `cut`; none on all but the last stage."""
    expected, lengths = reference.outcome.predictions, reference.batch.lengths.tolist()
    asked = reference.batch.fields["weights"] != 0
    distances = []
    for found, sequences in zip(predictions, cut if predictions else [], strict=True):
        for name in ("log_probs", "entropy"):
            whole = (getattr(expected, name) * asked).split(lengths)
            distances += [
                float((mine - whole[index]).abs().max())
                for mine, index in zip(
                    getattr(found, name).split([lengths[index] for index in sequences]), sequences, strict=True
                )
            ]
    return distances


def _summed(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)
