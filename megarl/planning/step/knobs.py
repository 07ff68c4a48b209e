"""Which knob moves a step most: each size doubled and halved, and what it does to seconds and memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from converters.errors import UserError
from converters.layouts.megatron import check_divisible
from converters.layouts.parallel_sizes import ParallelSizes
from megarl.planning.refit import engine_sizes
from megarl.planning.sizes import trainer_sizes
from megarl.planning.step.prediction import PlannedStep, StepPrediction


@dataclass(frozen=True)
class Turned:
    """A knob that was turned."""

    name: str
    """Example: "--tp 8", as the command takes it."""
    prediction: StepPrediction


def turned_knobs(step: PlannedStep) -> list[Turned]:
    """Every knob that can be turned, the one that saves most seconds first."""
    found = []
    for name, change in _changes(step):
        try:
            prediction = StepPrediction(change())
            found.append((prediction.step_seconds, Turned(name, prediction)))
        except UserError:
            continue
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


_Change = Callable[[], PlannedStep]


def _changes(step: PlannedStep) -> Iterator[tuple[str, _Change]]:
    """Each knob by its option, and the step in which it is turned."""
    work, recompute = step.workload, step.training.recompute
    sizes = trainer_names(step.refit.trainer)
    for name, size in sizes.items():
        for value in (2 * size, size // 2):
            if value:
                yield f"--{name} {value}", partial(_with_trainer, step, {**sizes, name: value})
    yield from _engine_changes(step)
    for value in (2 * work.max_tokens_per_micro_batch, work.max_tokens_per_micro_batch // 2):
        portions = replace(work, max_tokens_per_micro_batch=max(1, value))
        yield f"--micro-batch-tokens {value}", partial(replace, step, workload=portions)
    again = replace(step.training, recompute=replace(recompute, is_full=not recompute.is_full))
    yield f"--recompute {'none' if recompute.is_full else 'full'}", partial(replace, step, training=again)
    if not step.refit.colocated and not step.staleness:
        yield "--staleness 1", partial(replace, step, staleness=1)


def _with_trainer(step: PlannedStep, sizes: Mapping[str, int]) -> PlannedStep:
    """The same ranks, cut in another way."""
    refit = step.refit
    trainer = trainer_sizes(
        *(refit.architecture, refit.trainer.world_size, sizes["tp"], sizes["pp"], sizes["cp"], sizes["ep"]),
        fully_sharded=refit.trainer.use_torch_fsdp2,
    )
    return replace(step, refit=replace(refit, trainer=trainer))


def trainer_names(parallel: ParallelSizes) -> Mapping[str, int]:
    """The trainer's sizes by the names of the options."""
    return {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
    }


def _engine_changes(step: PlannedStep) -> Iterator[tuple[str, _Change]]:
    engine, gpus = step.refit.engine, step.refit.destinations
    tensor = engine.tensor_model_parallel_size
    expert = engine.expert_model_parallel_size if engine.expert_model_parallel_size > 1 else None
    others = [(f"--engine-tp {value}", value, expert) for value in (2 * tensor, tensor // 2) if value]
    if step.refit.architecture.num_experts and expert is None and tensor > 1:
        others.append((f"--engine-ep {tensor}", tensor, tensor))
    for name, new_tensor, new_expert in others:
        yield name, partial(_with_engine, step, gpus, new_tensor, new_expert)
    if step.refit.engine_dtype == "bf16":
        yield "--engine-dtype fp8", partial(_in_fp8, step)


def _in_fp8(step: PlannedStep) -> PlannedStep:
    refit = replace(step.refit, engine_dtype="fp8")
    refit.check_served()
    return replace(step, refit=refit)


def _with_engine(step: PlannedStep, gpus: int, tensor: int, expert: int | None) -> PlannedStep:
    """The same GPUs, as engines of another size."""
    engine = engine_sizes(tensor, expert)
    if gpus % engine.world_size:
        raise UserError(f"{gpus} GPUs are no engines of {engine.world_size}")
    check_divisible(step.refit.engine_architecture, engine)
    refit = replace(step.refit, engine=engine, replicas=gpus // engine.world_size)
    refit.check_served()
    return replace(step, refit=refit)
