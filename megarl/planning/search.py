"""Finds the sizes with the lowest predicted time among those that fit, the runner-up, and why others do not fit.

Trainer and engines are searched separately, because the time of each does not depend on the other's sizes, except for
the refit. The refit is added when the best of both are combined.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

from converters.errors import UserError
from megarl.planning.amounts import say_bytes, say_count
from megarl.planning.sizes import all_engine_sizes, all_trainer_sizes
from megarl.planning.step.prediction import PlannedStep, StepPrediction

_TRAINER_SHARES = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)
"""Shares of the GPUs that train, if trainer and engines have separate GPUs."""
_SHORT_LIST = 6
"""Number of trainers, and of engines, that are tried in combination."""


@dataclass
class FallenOut:
    """Candidates that lack memory or that no run can have, and the number of those that fit."""

    who: str
    count: int = 0
    least_bytes: int = 0
    """Memory that the nearest candidate lacks."""
    nearest: str = ""
    idle: int = 0
    """Number of further candidates, with more data-parallel ranks than there are responses."""
    unserved: int = 0
    """Number of further candidates that no run can have: see `PlannedRefit.check_served` and `kv_token_bytes`."""
    why_unserved: str = ""
    """The message that refuses one of them."""
    fitting: int = 0

    def add(self, lacking: int, name: str) -> None:
        """Count a candidate that lacks so many bytes."""
        if not self.count or lacking < self.least_bytes:
            self.least_bytes, self.nearest = lacking, name
        self.count += 1

    def refuse(self, reason: str) -> None:
        """Count a candidate that no run can have, for this reason."""
        self.unserved += 1
        self.why_unserved = reason

    def say(self) -> str:
        """Describe them in a sentence; empty if there are none."""
        said = []
        if self.count:
            said.append(
                f"{say_count(self.count, 'cut')} of {self.who} do not fit; the nearest, {self.nearest}, lacks"
                f" {say_bytes(self.least_bytes)}"
            )
        if self.unserved:
            said.append(
                f"{say_count(self.unserved, 'cut')} of {self.who} are none that a run can have, one of them because"
                f" {self.why_unserved}"
            )
        return "; ".join(said)


@dataclass(frozen=True)
class Proposal:
    """The result of a search: predictions, the best first."""

    best: Sequence[StepPrediction]
    fitting: int
    """Number of combinations of trainer and engines that fit."""
    fallen_out: Sequence[FallenOut] = field(default_factory=tuple)


def search(template: PlannedStep, gpus: int) -> Proposal:
    """Propose sizes for the model and workload of `template` on `gpus` GPUs.

    The GPUs are shared if the template's trainer and engines are colocated, else split. Raises UserError if nothing
    fits, with the memory that the nearest candidates lack.
    """
    if gpus == 1 and not template.refit.colocated:
        raise UserError("trainer and engines need a GPU each, and --gpus is 1: give 2 or more, or --colocated")
    lacking = FallenOut("the trainer"), FallenOut("an engine")
    found: list[StepPrediction] = []
    fitting = 0
    for trainer_gpus, engine_gpus in _splits(template, gpus):
        trainers = _fitting_trainers(template, trainer_gpus, lacking[0])
        engines = _fitting_engines(template, engine_gpus, lacking[1])
        fitting += len(trainers) * len(engines)
        lacking[0].fitting += len(trainers)
        lacking[1].fitting += len(engines)
        found.extend(_together(trainers, engines))
    if not found and lacking[0].idle and not lacking[0].count and not lacking[0].fitting:
        raise UserError(
            f"no trainer on {gpus} GPUs has responses for all of its ranks: a step has"
            f" {template.workload.responses}, in {say_count(template.workload.updates, 'update')}; give fewer GPUs, or"
            " more --prompts or --samples"
        )
    if not found:
        # If one side never fits, the other side is not the problem.
        in_the_way = [each for each in lacking if not each.fitting] or lacking
        reasons = "; ".join(filter(None, (each.say() for each in in_the_way))) or "the model cannot be cut over them"
        no_memory_helps = any(each.unserved and not each.count for each in in_the_way)
        advice = "" if no_memory_helps else "; give more GPUs, GPUs with more memory, or lower --micro-batch-tokens"
        raise UserError(f"nothing fits on {gpus} GPUs: {reasons}{advice}")
    return Proposal(sorted(found, key=lambda each: each.step_seconds), fitting, lacking)


def _splits(template: PlannedStep, gpus: int) -> Iterator[tuple[int, int]]:
    if template.refit.colocated:
        yield gpus, gpus
        return
    node = min(template.refit.cluster.gpus_per_node, max(1, gpus // 2))
    # With few nodes, several shares round to the same number.
    for training in dict.fromkeys(max(node, round(gpus * share / node) * node) for share in _TRAINER_SHARES):
        if training < gpus:
            yield training, gpus - training


def _fitting_trainers(template: PlannedStep, gpus: int, lacking: FallenOut) -> list[StepPrediction]:
    """Trainers that fit, the fastest first, each with the recomputation asked for or, if that does not fit, full."""
    refit, recompute = template.refit, template.training.recompute
    fits = []
    world, fully_sharded = refit.cluster.gpus_per_node, refit.trainer.use_torch_fsdp2
    for sizes in all_trainer_sizes(refit.architecture, gpus, world, fully_sharded=fully_sharded):
        if sizes.data_parallel_size * template.workload.updates > template.workload.responses:
            lacking.idle += 1
            continue
        for is_full in dict.fromkeys((recompute.is_full, True)):
            training = replace(template.training, recompute=replace(recompute, is_full=is_full))
            each = StepPrediction(replace(template, refit=replace(refit, trainer=sizes), training=training))
            if each.trainer_room >= 0:
                fits.append(each)
                break
            if is_full:
                lacking.add(-each.trainer_room, say_trainer(each))
    return sorted(fits, key=lambda each: sum(each.training_seconds.values()))


def _fitting_engines(template: PlannedStep, gpus: int, lacking: FallenOut) -> list[StepPrediction]:
    refit, fits = template.refit, []
    for sizes in all_engine_sizes(refit.engine_architecture, gpus, refit.cluster.gpus_per_node):
        engines = replace(refit, engine=sizes, replicas=gpus // sizes.world_size)
        each = StepPrediction(replace(template, refit=engines))
        try:
            engines.check_served()
            room = min(each.engine_room, each.rollout_room)
        except UserError as error:
            lacking.refuse(str(error))
            continue
        if room >= 0:
            fits.append(each)
        else:
            lacking.add(-room, say_engine(each))
    return sorted(fits, key=lambda each: each.rollout_seconds)


def _together(trainers: Sequence[StepPrediction], engines: Sequence[StepPrediction]) -> Iterator[StepPrediction]:
    for trainer, engine in product(islice(trainers, _SHORT_LIST), islice(engines, _SHORT_LIST)):
        refit = replace(trainer.step.refit, engine=engine.step.refit.engine, replicas=engine.step.refit.replicas)
        together = StepPrediction(replace(trainer.step, refit=refit))
        if together.fits:
            yield together


def say_trainer(prediction: StepPrediction) -> str:
    """Describe the trainer's sizes: `64 GPUs, TP 2, PP 4, CP 1, EP 8, DP 8, recomputing`."""
    sizes = prediction.step.refit.trainer
    again = ", FSDP2" if sizes.use_torch_fsdp2 else ""
    again += ", recomputing" if prediction.step.training.recompute.is_full else ""
    return (
        f"{sizes.world_size} GPUs, TP {sizes.tensor_model_parallel_size}, PP {sizes.pipeline_model_parallel_size}, CP"
        f" {sizes.context_parallel_size}, EP {sizes.expert_model_parallel_size}, DP {sizes.data_parallel_size}{again}"
    )


def say_engine(prediction: StepPrediction) -> str:
    """Describe the engines' sizes: `8 x (TP 8)`."""
    refit = prediction.step.refit
    expert = refit.engine.expert_model_parallel_size
    return f"{refit.replicas} x (TP {refit.engine.tensor_model_parallel_size}{f', EP {expert}' if expert > 1 else ''})"
