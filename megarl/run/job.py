"""Everything that an RL run holds: processes, data and position, built from the configuration."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from converters.gc_pause import gc_frozen
from megarl.algorithms import AdaptiveKl, PolicyObjective
from megarl.cluster.colocation import GpuSharing
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.cluster.placement.roles import POLICY
from megarl.cluster.trainer.trainer_group import TrainerGroup
from megarl.cluster.workers.idle_ranks import IdleRanks
from megarl.config.without_effect import without_effect
from megarl.data import Prompt, PromptSampler
from megarl.data.sampler import digest_of
from megarl.diagnostics.alerts import Alerts
from megarl.models.auxiliary import AuxiliaryModels, auxiliary_options, check_auxiliary, open_auxiliary
from megarl.models.policy import Model
from megarl.models.prompts import read_prompts
from megarl.output.export import write_export
from megarl.process.phase import phase
from megarl.refit.engine_start import EngineStart
from megarl.refit.refit import Refit
from megarl.rewards import Scorer
from megarl.run.checkpoints import Checkpoints
from megarl.run.opening import Processes, RunSetup, open_processes
from megarl.run.rollouts import Rollouts, RolloutWorkers
from megarl.run.schedule import Schedule
from megarl.run.throughput import Throughput
from megarl.run.timeline import Timeline, recorded_ranks
from megarl.schema import MegarlConfig
from megarl.tracking import MetricValue, Tracker


@dataclass(frozen=True)
class PromptData:
    """The prompts to train on, and the held-out ones."""

    prompts: list[Prompt]
    eval_prompts: list[Prompt]


@dataclass
class LoopState:
    """Position of the training loop. `step` is also the version of the weights: each step makes the next version."""

    step: int
    sampler: PromptSampler
    kl: AdaptiveKl


@dataclass(frozen=True)
class Job:
    """A run with all its processes up."""

    setup: RunSetup
    config: MegarlConfig
    model: Model
    data: PromptData
    objective: PolicyObjective
    scorer: Scorer
    trainer: TrainerGroup
    auxiliary: AuxiliaryModels
    engines: EngineGroup
    gpus: GpuSharing
    refit: Refit
    tracker: Tracker
    throughput: Throughput
    timeline: Timeline
    alerts: Alerts
    checkpoints: Checkpoints
    state: LoopState
    rollouts: Rollouts

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.state.step

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self.state.step >= self.setup.steps

    def begin_steps(self) -> None:
        """Measure ranks, GPUs and engines from here on: what they did during the start belongs to no step."""
        self.gpus.end_step()
        self.engines.begin_steps()
        self.throughput.begin_steps()

    def log(self, metrics: Mapping[str, MetricValue]) -> None:
        """Pass the metrics of the current step to all loggers, and print warnings of metrics that stay bad."""
        seen = self.alerts.observe(self.state.step, metrics)
        self.tracker.log(self.state.step, {**metrics, **seen.metrics})
        for warning in seen.warnings:
            print(warning, file=sys.stderr, flush=True)

    def export(self) -> None:
        """Write the trained models as HuggingFace folders, replacing earlier exports of this run."""
        self.gpus.switch_to(self.trainer)
        self.setup.export_policy(self.trainer, self.state.step)
        for name, trained in self.auxiliary.trained.items():
            write = partial(trained.export, copy_from=self.model.folder)
            write_export(write, Path(self.config.output_dir) / name, self.state.step)

    def save(self) -> None:
        """Write a checkpoint of the current step, or with `checkpoint.async_save` begin to."""
        state = self.state
        self.gpus.switch_to(self.trainer)
        self.checkpoints.save(
            state.step,
            lambda write: {
                **self.setup.state,
                **self.rollouts.save(write),
                "kl": state.kl.state_dict(),
                "engines": self.engines.state_dict(),
            },
        )


@contextmanager
def open_job(setup: RunSetup) -> Iterator[Job]:
    """Check everything that can be checked without a process, then start all processes; they end with the context.

    If the setup has a checkpoint, everything continues from it.
    """
    config, model, checkpoint = setup.config, setup.model, setup.checkpoint
    for sentence in without_effect(config):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        with phase("checking the data"):
            data = _read_prompt_data(config, model)
            check_auxiliary(config, model, data.prompts)
            objective = PolicyObjective(config.algorithm)
            state = _position(setup, data.prompts)
            scorer = stack.enter_context(Scorer(config.reward))
            scorer.check_questions((*data.prompts, *data.eval_prompts))
        roles = {POLICY: setup.options, **auxiliary_options(config)}
        processes = stack.enter_context(open_processes(config, roles, engines=True))
        tracker = processes.tracker(setup)
        with phase(f"starting trainer and engines{f', from step {setup.step}' if checkpoint else ''}"):
            models = _start_models(setup, processes, data.prompts, reference=objective.needs_reference)
            rollouts = _rollouts(config, model, models, data.prompts, scorer, state)
            if checkpoint is not None:
                rollouts.load(checkpoint.folder, checkpoint.state)
        trained = {"": models.trainer, **models.auxiliary.trained}
        checkpoints = stack.enter_context(Checkpoints(config, "train", trained))
        stack.enter_context(gc_frozen(collect=True))
        yield Job(
            setup=setup,
            config=config,
            model=model,
            data=data,
            objective=objective,
            scorer=scorer,
            trainer=models.trainer,
            auxiliary=models.auxiliary,
            engines=models.engines,
            gpus=models.gpus,
            refit=models.refit,
            tracker=tracker,
            throughput=processes.throughput(
                models.trainer, computing=("log_probs", "update"), waiting=("rollout", "reward")
            ),
            timeline=_timeline(config, models, scorer),
            alerts=Alerts.of_run(config, Path(config.output_dir), state.step),
            checkpoints=checkpoints,
            state=state,
            rollouts=rollouts,
        )


class OptimizerSteps(NamedTuple):
    """Total optimizer steps of policy and auxiliary models, at which the decay of their learning rates ends."""

    policy: int
    auxiliary: int


def optimizer_steps(config: MegarlConfig, steps: int) -> OptimizerSteps:
    """Count the optimizer steps of the models in a run of `steps` steps."""
    updates = config.algorithm.updates_per_step
    # While the critic warms up, the policy's learning-rate schedule does not advance; it needs at least one step.
    return OptimizerSteps(policy=max(1, steps - config.critic.warmup_steps) * updates, auxiliary=steps * updates)


class _Models(NamedTuple):
    """The models of a run, with their processes started."""

    trainer: TrainerGroup
    auxiliary: AuxiliaryModels
    engines: EngineGroup
    gpus: GpuSharing
    refit: Refit


def _start_models(setup: RunSetup, processes: Processes, prompts: Sequence[Prompt], *, reference: bool) -> _Models:
    """Start trainer and engines concurrently, then the auxiliary models; load the checkpoint into trained models."""
    config, checkpoint = setup.config, setup.checkpoint
    engines = processes.engines()
    if checkpoint is not None:
        engines.load_state_dict(checkpoint.state["engines"])
    trainer = processes.trainer(setup.options)
    gpus = processes.gpus(engines)
    token_ids = [prompt.token_ids for prompt in prompts]
    engine_start = EngineStart(trainer, engines, setup.model, config, token_ids, gpus)
    trainer.start()
    steps = optimizer_steps(config, setup.steps)
    trainer.build(setup.model.folder, setup.model.megatron_checkpoint, steps.policy, reference=reference)
    gpus.add(trainer)
    auxiliary = open_auxiliary(config, steps.auxiliary, processes.trainer, made=gpus.add)
    if checkpoint is not None:
        engine_start.compare()
        gpus.switch_to(trainer)
        trainer.load(checkpoint.folder)
        for name, group in auxiliary.trained.items():
            group.load(checkpoint.folder / name)
    return _Models(trainer, auxiliary, engines, gpus, engine_start.finish())


def _rollouts(
    config: MegarlConfig, model: Model, models: _Models, prompts: Sequence[Prompt], scorer: Scorer, state: LoopState
) -> Rollouts:
    workers = RolloutWorkers(
        models.engines,
        scorer,
        models.auxiliary.reward_model,
        models.gpus,
        model.tokenizer,
        tuple(model.stop_token_ids),
        IdleRanks([models.trainer, *models.auxiliary.groups]),
    )
    return Rollouts(config, prompts, state.sampler, _schedule(config, state.step), workers)


def _timeline(config: MegarlConfig, models: _Models, scorer: Scorer) -> Timeline:
    ranks = recorded_ranks([models.trainer, *models.auxiliary.groups])
    folder = Path(config.output_dir)
    return Timeline(config.tracking.profile, folder, ranks, models.engines, scorer, models.gpus)


def _schedule(config: MegarlConfig, version: int) -> Schedule:
    schedule = config.schedule
    return Schedule(config.loop.prompts_per_step, schedule.max_staleness, schedule.window, version=version)


def _read_prompt_data(config: MegarlConfig, model: Model) -> PromptData:
    train, held_out = config.data.train_files, config.data.eval_files
    return PromptData(
        prompts=read_prompts(train, model, config),
        eval_prompts=read_prompts(held_out, model, config) if held_out else [],
    )


def _position(setup: RunSetup, prompts: Sequence[Prompt]) -> LoopState:
    """Position of the loop at the start of the run, from the checkpoint if there is one."""
    sampler = setup.sampler(len(prompts), digest_of(prompt.token_ids for prompt in prompts))
    state = LoopState(setup.step, sampler, AdaptiveKl.from_config(setup.config.algorithm))
    if setup.checkpoint is not None:
        state.kl.load_state_dict(setup.checkpoint.state["kl"])
    return state
