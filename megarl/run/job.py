"""Everything a run holds: its processes, its data, its position. Made from the configuration, ended with the run."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from megarl.algorithms import ADVANTAGES, AdaptiveKl, PolicyObjective
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.runtime import ray_cluster
from megarl.cluster.trainer_group import TrainerGroup
from megarl.config.megatron import megatron_options
from megarl.config.without_effect import without_effect
from megarl.data import Prompt, PromptSampler, load_prompts
from megarl.diagnostics.watch import Watch
from megarl.models.auxiliary import Companions, check_companions, open_companions, wanted_companions
from megarl.models.policy import Model, check_layout, read_model
from megarl.output.export import check_that_none_is_lost, step_of_export, write_export
from megarl.output.places import EXPORT, LOGS, TRAINED_COMPANIONS
from megarl.process.phase import phase
from megarl.refit.engine_start import EngineStart
from megarl.refit.refit import Refit
from megarl.rewards import Scorer
from megarl.rollout import engine_configuration
from megarl.run.checkpoints import CheckpointWriter, last_step, latest_checkpoint
from megarl.schema import MegarlConfig
from megarl.tracking import MetricValue, Run, Tracker, open_tracker

_COMMAND = "train"


@dataclass(frozen=True)
class Task:
    """Data and rewards that the policy is trained on."""

    prompts: list[Prompt]
    eval_prompts: list[Prompt]


@dataclass
class LoopState:
    """Where the loop stands. `step` is also the version of the weights: each step makes the next one."""

    step: int
    sampler: PromptSampler
    kl: AdaptiveKl


@dataclass(frozen=True)
class Job:
    """A run with all its processes up."""

    config: MegarlConfig
    model: Model
    task: Task
    objective: PolicyObjective
    scorer: Scorer
    trainer: TrainerGroup
    companions: Companions
    engines: EngineGroup
    refit: Refit
    tracker: Tracker
    watch: Watch
    state: LoopState

    def needs(self, field: str) -> bool:
        """Whether the advantage is made from this field of `ScoredResponses`."""
        return field in ADVANTAGES[self.config.algorithm.advantage].needs

    def log(self, metrics: Mapping[str, MetricValue]) -> None:
        """Give the metrics of the present step to all loggers, with a warning of what goes wrong slowly."""
        seen = self.watch.observe(self.state.step, metrics)
        self.tracker.log(self.state.step, {**metrics, **seen.metrics})
        for warning in seen.warnings:
            print(warning, file=sys.stderr, flush=True)

    def export(self) -> None:
        """Write the trained models as HuggingFace folders, which then take the place of earlier ones of this run."""
        for name, trained in {EXPORT: self.trainer, **self.companions.trained}.items():
            write = partial(trained.export, copy_from=self.model.folder)
            write_export(write, Path(self.config.output_dir) / name, self.state.step)

    def save(self) -> None:
        """Write a checkpoint of the present step."""
        step = self.state.step
        with CheckpointWriter(self.config, _COMMAND, step) as checkpoint:
            checkpoint.save(self.trainer)
            for name, companion in self.companions.trained.items():
                checkpoint.save(companion, name)
            checkpoint.state |= {
                "engine_version": step,
                "sampler": self.state.sampler.state_dict(),
                "kl": self.state.kl.state_dict(),
            }


@contextmanager
def open_job(config: MegarlConfig) -> Iterator[Job]:
    """Check everything that can be checked without a process, then start them all; they end with the context.

    A run whose output_dir holds a complete checkpoint continues from it, unless `checkpoint.resume` is never.
    """
    for sentence in without_effect(config.algorithm):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        with phase("checking model and data"):
            model = read_model(config.model, config.rollout.stop_token_ids)
            options = megatron_options(config)
            check_layout(model.architecture, options)
            task = _read_task(config, model)
            check_companions(config, model, task.prompts)
            objective = PolicyObjective(config.algorithm)
            state, checkpoint = _position(config, len(task.prompts))
            scorer = stack.enter_context(Scorer(config.reward))
            scorer.check_data_sources({prompt.data_source for prompt in (*task.prompts, *task.eval_prompts)})
        stack.enter_context(ray_cluster(config.cluster))
        tracker = stack.enter_context(open_tracker_of(config, step=state.step, last_step=config.loop.steps))
        with phase(f"starting trainer and engines{f', from step {state.step}' if checkpoint else ''}"):
            logs = Path(config.output_dir) / LOGS
            engines = stack.enter_context(EngineGroup(engine_configuration(config), config.cluster, logs))
            trainer = stack.enter_context(
                TrainerGroup(options, config.cluster, logs, config.loop.max_tokens_per_micro_batch)
            )
            prompts = [prompt.token_ids for prompt in task.prompts]
            engine_start = EngineStart(trainer, engines, model, config, prompts)
            trainer.start()
            total_steps = config.loop.steps * config.algorithm.updates_per_step
            trainer.build(model.folder, model.megatron_checkpoint, total_steps, reference=objective.needs_reference)
            companions = open_companions(config, logs, total_steps, stack)
            if checkpoint is not None:
                engine_start.compare()
                trainer.load(checkpoint)
                for name, companion in companions.trained.items():
                    companion.load(checkpoint / name)
            refit = engine_start.finish()
        yield Job(
            config=config,
            model=model,
            task=task,
            objective=objective,
            scorer=scorer,
            trainer=trainer,
            companions=companions,
            engines=engines,
            refit=refit,
            tracker=tracker,
            watch=Watch.of_run(config, Path(config.output_dir), state.step),
            state=state,
        )


def _read_task(config: MegarlConfig, model: Model) -> Task:
    train, held_out = config.data.train_files, config.data.eval_files
    return Task(
        prompts=_read_prompts(train, config, model),
        eval_prompts=_read_prompts(held_out, config, model) if held_out else [],
    )


def _read_prompts(files: list[str], config: MegarlConfig, model: Model) -> list[Prompt]:
    found = load_prompts(files, model.tokenizer, config.data)
    if found.dropped:
        limit = config.data.max_prompt_tokens
        print(f"{found.dropped} prompts of {', '.join(files)} are longer than {limit} tokens and are left out")
    return found.prompts


def _position(config: MegarlConfig, prompts: int) -> tuple[LoopState, Path | None]:
    """Where to start: the state, and the checkpoint it comes from."""
    sampler = PromptSampler(prompts, config.data.shuffle, config.loop.seed)
    state = LoopState(step=0, sampler=sampler, kl=AdaptiveKl.from_config(config.algorithm))
    if (found := latest_checkpoint(config, _COMMAND)) is None:
        check_that_none_is_lost(exports_of(config))
        return state, None
    state.step = found.step
    state.sampler.load_state_dict(found.state["sampler"])
    state.kl.load_state_dict(found.state["kl"])
    return state, found.folder


def exports_of(config: MegarlConfig) -> list[Path]:
    """The folders that a run exports its trained models to."""
    trained = [name for name in TRAINED_COMPANIONS if name in wanted_companions(config)]
    return [Path(config.output_dir) / name for name in (EXPORT, *trained)]


def is_finished(config: MegarlConfig) -> bool:
    """Whether `output_dir` holds the run at its last step, exported: there is nothing left to do.

    Raises UserError where what is there is of another command.
    """
    return (
        last_step(config) >= config.loop.steps
        and config.checkpoint.resume != "never"
        and all(step_of_export(export) == last_step(config) for export in exports_of(config))
        and latest_checkpoint(config, _COMMAND) is not None
    )


def open_tracker_of(config: MegarlConfig, *, step: int, last_step: int) -> Tracker:
    """The loggers of a run that has done `step` of `last_step` steps."""
    run = Run(
        output_dir=Path(config.output_dir),
        first_step=step + 1 if step else 0,
        last_step=last_step,
        project=config.tracking.project,
        run_name=config.tracking.run_name,
        resumed=step > 0,
        config=asdict(config),
    )
    return open_tracker(config.tracking.loggers, run)
