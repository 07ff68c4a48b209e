"""Everything a run holds: its processes, its data, its position. Made from the configuration, ended with the run."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from converters.architectures import Architecture, read_architecture
from converters.convert import check_checkpoint, check_distributed
from converters.errors import UserError
from converters.formats.safetensors import CONFIG, HuggingFaceCheckpoint, read_json
from converters.formats.torch_dist import TorchDistCheckpoint
from converters.layouts.megatron import megatron_layout
from megarl.algorithms import PolicyObjective
from megarl.cluster.engine_group import EngineGroup
from megarl.cluster.runtime import ray_cluster
from megarl.cluster.trainer_group import TrainerGroup
from megarl.config.megatron import megatron_options
from megarl.config.schema import MegarlConfig, ModelConfig
from megarl.data import Prompt, PromptSampler, load_prompts
from megarl.rewards import RewardFunction, load_reward
from megarl.stages.probe import Probe
from megarl.stages.refit import Refit
from megarl.tracking import Run, Tracker, open_tracker
from megatron_ext import checkpoint_folder
from megatron_ext.options import MegatronOptions

CHECKPOINTS = "checkpoints"
EXPORT = "huggingface"
LOGS = "logs"

_PROBED_PROMPTS = 16
_PROBED_TOKENS = 8


@dataclass(frozen=True)
class Model:
    """The policy as it lies on disk: what it is and how its tokens are made."""

    folder: Path
    megatron_checkpoint: Path | None
    """Where the weights are, if not in `folder`."""
    architecture: Architecture
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]


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
        # The engines start while the ranks read the weights; their first weights come by the first refit.
        starting = engines.begin_start(model.folder, load_weights=False)
        trainer.start()
        trainer.build(
            model.folder,
            model.megatron_checkpoint,
            total_steps=config.loop.steps * config.algorithm.updates_per_step,
            reference=config.algorithm.kl_coefficient > 0,
        )
        if checkpoint is not None:
            trainer.load(checkpoint)
        engines.wait_started(starting)
        yield Job(
            config=config,
            model=model,
            task=task,
            objective=PolicyObjective.from_config(config.algorithm),
            trainer=trainer,
            engines=engines,
            refit=Refit(trainer, engines, model.architecture, config.refit, _probe(config, task)),
            tracker=tracker,
            state=state,
        )


def _probe(config: MegarlConfig, task: Task) -> Probe | None:
    if config.refit.verify != "logprobs":
        return None
    prompts = [prompt.token_ids for prompt in task.prompts[:_PROBED_PROMPTS]]
    return Probe(prompts, min(_PROBED_TOKENS, config.rollout.max_response_tokens), config.refit.log_prob_tolerance)


def read_model(config: ModelConfig, extra_stop_token_ids: list[int]) -> Model:
    """What the model's folders hold, checked whole: a missing or misshapen tensor is found here.

    Raises UserError for what cannot be trained.
    """
    folder = Path(config.path)
    megatron_checkpoint = Path(config.megatron_checkpoint) if config.megatron_checkpoint else None
    architecture = read_architecture(read_json(folder / CONFIG))
    if architecture.mtp_layers:
        raise UserError(
            f"{folder / 'config.json'} has {architecture.mtp_layers} layers for multi-token prediction, whose training"
            " is not supported yet; train a copy of the model that leaves them out (num_nextn_predict_layers: 0, no"
            f" tensors of model.layers.{architecture.num_layers} and after)"
        )
    if megatron_checkpoint:
        check_distributed(TorchDistCheckpoint(megatron_checkpoint), architecture)
    else:
        check_checkpoint(HuggingFaceCheckpoint(folder), architecture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stop_token_ids = _stop_token_ids(folder, tokenizer, extra_stop_token_ids)
    return Model(folder, megatron_checkpoint, architecture, tokenizer, stop_token_ids)


def check_layout(architecture: Architecture, options: MegatronOptions) -> None:
    """Raise UserError if the sizes of the model don't divide by those of the parallel layout."""
    megatron_layout(architecture, options.parallel, module_names="local")


def _stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, extra: list[int]) -> tuple[int, ...]:
    stop = {tokenizer.eos_token_id, *extra}
    if (folder / "generation_config.json").exists():
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        stop |= set(ends if isinstance(ends, list) else [ends])
    return tuple(sorted(stop - {None}))


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
