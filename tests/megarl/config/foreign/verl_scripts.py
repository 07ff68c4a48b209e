"""Scripts that run verl, in the manner of its examples, cut down to a tiny model on a CPU."""

from pathlib import Path

from megarl.config.foreign.from_verl import from_verl
from megarl.config.foreign.recipe import TranslatedRecipe

_HEAD = """#!/usr/bin/env bash
set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
MODEL_PATH=${MODEL_PATH:-"${HOME}/models/tiny"}
TRAIN_FILE=${TRAIN_FILE:-"${HOME}/data/train.parquet"}
TEST_FILE=${TEST_FILE:-"${HOME}/data/test.parquet"}
REWARD_FILE=${REWARD_FILE:-reward.py}
train_files="['$TRAIN_FILE']"
test_files="['$TEST_FILE']"
max_prompt_length=$((4 * 4))
max_response_length=$((2 * 4))
"""
_COMMON = """    data.train_files="$train_files" \\
    data.val_files="$test_files" \\
    data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=${max_response_length} \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    actor_rollout_ref.actor.megatron.dtype=float32 \\
    actor_rollout_ref.rollout.name=vllm \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.dtype=float32 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=8388608 \\
    actor_rollout_ref.rollout.max_model_len=32 \\
    custom_reward_function.path=$REWARD_FILE \\
    custom_reward_function.name=begins_with_a_digit \\
    trainer.logger='["console","swanlab"]' \\
    trainer.project_name='verl_example' \\
    trainer.nnodes=1 \\
    trainer.total_training_steps=2 \\
"""

GRPO = f"""{_HEAD}
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=8 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.use_fused_kernels=True \\
{_COMMON}    actor_rollout_ref.actor.optim.lr=1e-3 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \\
    algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 \\
    trainer.experiment_name='tiny_megatron' \\
    trainer.n_gpus_per_node=2 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 $@
"""

DAPO = f"""{_HEAD}
clip_ratio_low=0.2
clip_ratio_high=0.28
use_dynamic_bsz=True
token_limit=$(((max_prompt_length + max_response_length) * 2))
python3 -m recipe.dapo.main_dapo \\
    algorithm.adv_estimator=grpo \\
    data.prompt_key=prompt \\
    data.truncation='left' \\
    data.train_batch_size=8 \\
    +data.gen_batch_size=16 \\
{_COMMON}    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.clip_ratio_low=${{clip_ratio_low}} \\
    actor_rollout_ref.actor.clip_ratio_high=${{clip_ratio_high}} \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    actor_rollout_ref.actor.use_dynamic_bsz=${{use_dynamic_bsz}} \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${{token_limit}} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
    actor_rollout_ref.actor.optim.lr=1e-3 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.optim.weight_decay=0.1 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.actor.grad_clip=1.0 \\
    actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.temperature=1.0 \\
    +algorithm.filter_groups.enable=True \\
    +algorithm.filter_groups.metric=acc \\
    +algorithm.filter_groups.max_num_gen_batches=10 \\
    reward_model.reward_manager=dapo \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4 \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \\
    +reward_model.reward_kwargs.max_resp_len=${{max_response_length}} \\
    trainer.experiment_name=dapo \\
    trainer.n_gpus_per_node=1 \\
    trainer.val_before_train=False \\
    trainer.resume_mode=auto
"""

PPO = f"""{_HEAD}
python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer' \\
    algorithm.adv_estimator=gae \\
    algorithm.lam=0.95 \\
    data.train_batch_size=16 \\
{_COMMON}    actor_rollout_ref.actor.optim.lr=1e-3 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    algorithm.use_kl_in_reward=True \\
    algorithm.kl_penalty=kl \\
    algorithm.kl_ctrl.kl_coef=0.01 \\
    critic.optim.lr=1e-2 \\
    critic.model.path="${{MODEL_PATH}}" \\
    critic.ppo_micro_batch_size_per_gpu=4 \\
    trainer.critic_warmup=2 \\
    trainer.experiment_name='ppo' \\
    trainer.n_gpus_per_node=2
"""

SCRIPTS = {"grpo": GRPO, "dapo": DAPO, "ppo": PPO}

ACTOR = "actor_rollout_ref.actor."
MEGATRON = f"{ACTOR}strategy=megatron"
PPO_KEYS = ["algorithm.adv_estimator=gae", "data.train_batch_size=16", f"{ACTOR}ppo_mini_batch_size=8", MEGATRON]
"""The least that asks for a critic, without a word to be said."""


def translated(folder: Path, script: str) -> TranslatedRecipe:
    """The recipe of a script."""
    file = folder / "run.sh"
    file.write_text(script)
    return from_verl([str(file)], {"HOME": "/home/someone"})


def said(notes: dict[str, list[str]]) -> list[str]:
    return [each for settings in notes.values() for each in settings]
