"""Everything a run holds: its processes, its data, its position. Made from the configuration, ended with the run."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from converters.errors import UserError
from megarl.algorithms import PolicyObjective
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.runtime import ray_cluster
from megarl.cluster.trainer_group import TrainerGroup
from megarl.config.megatron import megatron_options
from megarl.config.schema import MegarlConfig
from megarl.data import Prompt, PromptSampler, load_prompts
from megarl.model import Model, check_layout, check_loadable, read_model
from megarl.rewards import RewardFunction, load_reward
from megarl.stages.probe import Probe
from megarl.stages.refit import Refit, check_machines
from megarl.tracking import Run, Tracker, open_tracker
from megatron_ext import checkpoint_folder

CHECKPOINTS = "checkpoints"
EXPORT = "huggingface"
LOGS = "logs"

_PROBED_PROMPTS = 16
_PROBED_TOKENS = 8


@dataclass(frozen=True)
class Task:
    """What the policy is trained on."""

    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    reward: RewardFunction


@dataclass
class LoopState:
    """Where the loop stands. `step` is also the version of the weights: each step makes the next one."""

    step: int
    sampler: PromptSampler


@dataclass(frozen=True)
class Job:
    """A run with all its processes up."""

    config: MegarlConfig
    model: Model
    task: Task
    objective: PolicyObjective
    trainer: TrainerGroup
    engines: EngineGroup
    refit: Refit
    tracker: Tracker
    state: LoopState

    def log(self, metrics: Mapping[str, float]) -> None:
        """Give the metrics of the present step to all loggers."""
        self.tracker.log(self.state.step, metrics)

    def export(self) -> None:
        """Write the trained model as a HuggingFace folder, in the place of an earlier one of this run."""
        folder = Path(self.config.output_dir) / EXPORT
        if folder.exists():
            shutil.rmtree(folder)
        self.trainer.export(folder, self.model.folder)

    def save(self) -> None:
        """Write a checkpoint of the present step."""
        root, step = checkpoints_folder(self.config), self.state.step
        folder = checkpoint_folder.begin(root, step)
        try:
            self.trainer.save(folder)
        except BaseException:
            checkpoint_folder.abandon(root, step)
            raise
        controller_state = {"step": step, "engine_version": step, "sampler": self.state.sampler.state_dict()}
        checkpoint_folder.commit(root, step, controller_state, keep=self.config.checkpoint.keep)


def checkpoints_folder(config: MegarlConfig) -> Path:
    """Where the checkpoints of a run are."""
    return Path(config.output_dir) / CHECKPOINTS


@contextmanager
def open_job(config: MegarlConfig) -> Iterator[Job]:
    """Check everything that can be checked without a process, then start them all; they end with the context.

    A run whose output_dir holds a complete checkpoint continues from it, unless `checkpoint.resume` is never.
    """
    model = read_model(config.model, config.rollout.stop_token_ids)
    options = megatron_options(config)
    check_layout(model.architecture, options)
    task = _read_task(config, model)
    state, checkpoint = _position(config, len(task.prompts))
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        logs = Path(config.output_dir) / LOGS
        tracker = stack.enter_context(open_tracker_of(config, step=state.step, last_step=config.loop.steps))
        engines = stack.enter_context(EngineGroup(config.rollout, config.cluster, logs))
        trainer = stack.enter_context(
            TrainerGroup(options, config.cluster, logs, config.loop.max_tokens_per_micro_batch)
        )
        # Between machines nothing goes by name: engines and ranks begin with the same weights, and are compared.
        machines = len({*trainer.nodes(), *engines.nodes()})
        check_machines(machines, config.refit)
        if is_apart := machines > 1:
            check_loadable(model, machines)
        # The engines start while the ranks read the weights; without any, their first ones come by the first refit.
        starting = engines.begin_start(model.folder, load_weights=is_apart)
        trainer.start()
        trainer.build(
            model.folder,
            model.megatron_checkpoint,
            total_steps=config.loop.steps * config.algorithm.updates_per_step,
            reference=config.algorithm.kl_coefficient > 0,
        )
        make_refit = partial(Refit, trainer, engines, model.architecture, config.refit, _probe(config, task))
        if is_apart:
            engines.wait_started(starting)
            refit = make_refit(has_loaded=True)
            refit.confirm()
        if checkpoint is not None:
            trainer.load(checkpoint)
        if not is_apart:
            engines.wait_started(starting)
            refit = make_refit()
        yield Job(
            config=config,
            model=model,
            task=task,
            objective=PolicyObjective.from_config(config.algorithm),
            trainer=trainer,
            engines=engines,
            refit=refit,
            tracker=tracker,
            state=state,
        )


def _probe(config: MegarlConfig, task: Task) -> Probe | None:
    if config.refit.verify != "logprobs":
        return None
    prompts = [prompt.token_ids for prompt in task.prompts[:_PROBED_PROMPTS]]
    return Probe(prompts, min(_PROBED_TOKENS, config.rollout.max_response_tokens), config.refit.log_prob_tolerance)


def _read_task(config: MegarlConfig, model: Model) -> Task:
    train, held_out = config.data.train_files, config.data.eval_files
    return Task(
        prompts=_read_prompts(train, config, model),
        eval_prompts=_read_prompts(held_out, config, model) if held_out else [],
        reward=load_reward(config.reward.function),
    )


def _read_prompts(files: list[str], config: MegarlConfig, model: Model) -> list[Prompt]:
    found = load_prompts(files, model.tokenizer, config.data)
    if found.dropped:
        limit = config.data.max_prompt_tokens
        print(f"{found.dropped} prompts of {', '.join(files)} are longer than {limit} tokens and are left out")
    return found.prompts


def _position(config: MegarlConfig, prompts: int) -> tuple[LoopState, Path | None]:
    """Where to start: the state, and the checkpoint it comes from."""
    state = LoopState(step=0, sampler=PromptSampler(prompts, config.data.shuffle, config.loop.seed))
    root = checkpoints_folder(config)
    iterations = checkpoint_folder.complete_iterations(root)
    if not iterations:
        return state, None
    if config.checkpoint.resume == "never":
        raise UserError(
            f"{root} holds checkpoints up to step {iterations[-1]}, which checkpoint.resume=never would mix with those "
            "of a new run: choose another output_dir, remove the folder, or continue with checkpoint.resume=auto"
        )
    folder = checkpoint_folder.iteration_folder(root, iterations[-1])
    saved = checkpoint_folder.read_controller_state(folder)
    state.step = saved["step"]
    state.sampler.load_state_dict(saved["sampler"])
    return state, folder


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
