"""TRL's GRPOTrainer on the job of a megarl recipe; a separate program, which `step.py` runs and measures.

It takes `megarl train`'s arguments: model, data, lengths, sampling, loss and optimizer are those of that configuration,
the reward is the same built-in one, and metrics.jsonl gets the same lines.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megarl.algorithms.parts import option_defaults
from megarl.algorithms.policy_losses.surrogates import clipped
from megarl.cli import recipe
from megarl.cli.training import TRAINING_COMMANDS
from megarl.data.tokenizer import read_tokenizer
from megarl.rewards.registry import load_reward
from megarl.run.opening import open_tracker_of
from megarl.schema import MegarlConfig
from megarl.tracking import Tracker
from megarl.tracking.clock import Clock


class TimedGRPOTrainer(GRPOTrainer):
    """TRL's trainer, with timing of its rollouts, its rewards and everything before its update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock = Clock()
        self.mean_reward = 0.0
        super().__init__(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.stage("rollout"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.stage("reward"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        self.mean_reward = float(rewards.mean())
        return rewards

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.stage("before_update"):
            return super()._generate_and_score_completions(*args, **kwargs)


class StepMetrics(TrainerCallback):
    """Logs every step of `trainer` to `tracker`; a step lasts from the previous one's end to its own end."""

    def __init__(self, trainer: TimedGRPOTrainer, tracker: Tracker) -> None:
        self._trainer, self._tracker, self._tokens = trainer, tracker, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - transformers' names
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        times = self._trainer.clock.end_step(tokens)
        self._tracker.log(state.global_step, {"reward/mean": self._trainer.mean_reward, **_by_stage(times)})


def _by_stage(times: dict[str, float]) -> dict[str, float]:
    """The times of TRL's step, named as megarl's stages; TRL has no refit and no time outside its stages.

    Its log-probs before the update are part of the advantage.
    """
    before_update = times.pop("seconds/before_update")
    times.pop("seconds/overhead")
    return {
        **times,
        "seconds/advantage": before_update - times["seconds/rollout"] - times["seconds/reward"],
        "seconds/update": times["seconds/step"] - before_update,
    }


def grpo_config(config: MegarlConfig) -> GRPOConfig:
    """The same job as TRL's configuration."""
    optimizer, rollout, algorithm, loop = config.megatron, config.rollout, config.algorithm, config.loop
    clip = {**option_defaults(clipped), **algorithm.policy_loss_options}
    return GRPOConfig(
        output_dir=config.output_dir,
        seed=loop.seed,
        max_steps=loop.steps,
        per_device_train_batch_size=loop.prompts_per_step * loop.samples_per_prompt,
        num_generations=loop.samples_per_prompt,
        max_completion_length=rollout.max_response_tokens,
        shuffle_dataset=config.data.shuffle,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=max(rollout.top_k, 0),
        learning_rate=optimizer["lr"],
        lr_scheduler_type="constant",
        adam_beta1=optimizer.get("adam_beta1", 0.9),
        adam_beta2=optimizer.get("adam_beta2", 0.999),
        weight_decay=optimizer.get("weight_decay", 0.0),
        max_grad_norm=optimizer.get("clip_grad", 1.0),
        epsilon=clip["clip_low"],
        epsilon_high=clip["clip_high"],
        beta=algorithm.kl_coefficient,
        loss_type="dapo",  # the mean over all tokens of the batch
        scale_rewards="group" if algorithm.advantage_options.get("normalize_by_std", True) else "none",
        router_aux_loss_coef=0.0,
        # transformers' fastest way to run experts on a CPU: with its default a step took a fifth more CPU time.
        model_init_kwargs={"dtype": "float32", "experts_implementation": "eager"},
        bf16=False,
        use_cpu=True,
        # TRL's defaults here would only cost time.
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def rewards_of(
    reward: Callable[..., Any],
    completions: Sequence[Sequence[Mapping[str, str]]],
    data_source: Sequence[str],
    reward_model: Sequence[Mapping[str, Any]],
    **_: Any,
) -> list[float]:
    """One of megarl's rewards with TRL's interface: columns of the data set, and completions as chats."""
    return [
        reward(data_source=source, solution_str=chat[-1]["content"], ground_truth=truth["ground_truth"], extra_info={})
        for chat, source, truth in zip(completions, data_source, reward_model, strict=True)
    ]


def main() -> None:
    """Train to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    TRAINING_COMMANDS["train"].add_arguments(parser)
    options, overrides = parser.parse_known_args()
    options.overrides = overrides
    config = recipe.read_config(options)
    reward = partial(rewards_of, load_reward(config.reward.function))
    rows = [row for file in config.data.train_files for row in pq.read_table(file).to_pylist()]
    trainer = TimedGRPOTrainer(
        model=config.model.path,
        processing_class=read_tokenizer(Path(config.model.path)),
        args=grpo_config(config),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
    )
    with open_tracker_of(config, step=0, last_step=config.loop.steps) as tracker:
        trainer.add_callback(StepMetrics(trainer, tracker))
        trainer.train()


if __name__ == "__main__":
    main()
