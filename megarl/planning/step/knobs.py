"""Finds the knobs that change a step most: doubles and halves each size, and predicts seconds and memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from converters.errors import UserError
from converters.layouts.cuts import ENGINES
from converters.layouts.megatron import check_divisible
from converters.number_formats import FP8_BLOCK
from megarl.planning.refit import engine_sizes
from megarl.planning.sizes import stage_ends
from megarl.planning.step.prediction import PlannedStep, StepPrediction


@dataclass(frozen=True)
class Turned:
    """A changed knob."""

    name: str
    """All options that change, on the same GPUs, as the command accepts them. Example: "--engine-tp 8 --replicas 4"."""
    prediction: StepPrediction


def turned_knobs(step: PlannedStep) -> list[Turned]:
    """Every knob that can be changed, those that save most seconds first."""
    found = []
    for name, change in _changes(step):
        try:
            prediction = StepPrediction(change())
            found.append((prediction.step_seconds, Turned(name, prediction)))
        except UserError:
            continue
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


_Change = Callable[[], PlannedStep]
_TRAINER_SIZES = {
    "--tp": "tensor_model_parallel_size",
    "--pp": "pipeline_model_parallel_size",
    "--cp": "context_parallel_size",
    "--ep": "expert_model_parallel_size",
}
_ENDS = {
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
"""Options of sizes, and their fields in `ParallelSizes`."""


def _changes(step: PlannedStep) -> Iterator[tuple[str, _Change]]:
    """Yield each knob as its option, with a function that returns the changed step."""
    work, recompute = step.workload, step.training.recompute
    for option, name in _TRAINER_SIZES.items():
        for value in _doubled_and_halved(getattr(step.refit.trainer, name)):
            fields = {name: value, **(_moved_ends(step, value) if option == "--pp" else {})}
            said = "".join(f" {end} {fields[field]}" for end, field in _ENDS.items() if field in fields)
            yield f"{option} {value}{said}", partial(_with_trainer, step, fields)
    yield from _engine_changes(step)
    for value in _doubled_and_halved(work.max_tokens_per_micro_batch):
        # A sequence must fit in one micro-batch.
        if value < work.prompt_tokens + work.max_response_tokens:
            continue
        portions = replace(work, max_tokens_per_micro_batch=value)
        yield f"--micro-batch-tokens {value}", partial(replace, step, workload=portions)
    again = replace(step.training, recompute=replace(recompute, is_full=not recompute.is_full))
    yield f"--recompute {'none' if recompute.is_full else 'full'}", partial(replace, step, training=again)
    if not step.refit.colocated and not step.staleness:
        yield "--staleness 1", partial(replace, step, staleness=1)


def _doubled_and_halved(size: int) -> list[int]:
    return [value for value in (2 * size, size // 2) if value]


def _moved_ends(step: PlannedStep, stages: int) -> dict[str, int]:
    """The layers of the first and last of `stages` stages, if the command would not choose these by itself."""
    trainer, layers = step.refit.trainer, step.refit.architecture.num_layers
    moved = zip(_ENDS.values(), stage_ends(layers, stages), strict=True)
    # No option unsets an end that was given, but it can be set to the layers of the other stages.
    sizes = {name: size or layers // stages for name, size in moved if stages > 1}
    now = {name: getattr(trainer, name) for name in sizes}
    return {name: size for name, size in sizes.items() if now[name] != size and (now[name] or size != layers // stages)}


def _with_trainer(step: PlannedStep, fields: Mapping[str, Any]) -> PlannedStep:
    """The same ranks with only these sizes changed."""
    trainer = replace(step.refit.trainer, **fields)
    check_divisible(step.refit.architecture, trainer)
    return replace(step, refit=replace(step.refit, trainer=trainer))


def _engine_changes(step: PlannedStep) -> Iterator[tuple[str, _Change]]:
    engine, gpus = step.refit.engine, step.refit.destinations
    tensor = engine.tensor_model_parallel_size
    expert = engine.expert_model_parallel_size if engine.expert_model_parallel_size > 1 else None
    others = [(f"--engine-tp {value}", value, expert) for value in _doubled_and_halved(tensor)]
    if step.refit.architecture.num_experts and expert is None and tensor > 1:
        others.append((f"--engine-ep {tensor}", tensor, tensor))
    for name, new_tensor, new_expert in others:
        replicas = gpus // (new_expert or new_tensor)
        said = f" --replicas {replicas}" if replicas != step.refit.replicas else ""
        yield name + said, partial(_with_engine, step, gpus, new_tensor, new_expert)
    if step.refit.number_format is None:
        yield "--engine-dtype fp8", partial(_in_fp8, step)


def _in_fp8(step: PlannedStep) -> PlannedStep:
    refit = replace(step.refit, number_format=FP8_BLOCK)
    refit.check_served()
    return replace(step, refit=refit)


def _with_engine(step: PlannedStep, gpus: int, tensor: int, expert: int | None) -> PlannedStep:
    """The same GPUs with engines of another size."""
    engine = engine_sizes(tensor, expert)
    if gpus % engine.world_size:
        raise UserError(f"{gpus} GPUs are no engines of {engine.world_size}")
    check_divisible(step.refit.engine_architecture, engine, ENGINES)
    refit = replace(step.refit, engine=engine, replicas=gpus // engine.world_size)
    refit.check_served()
    return replace(step, refit=refit)
