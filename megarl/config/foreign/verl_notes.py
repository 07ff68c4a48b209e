"""Keys of verl without a translation, and the note on each."""

from collections.abc import Mapping
from typing import Any

from megarl.config.foreign.recipe import SAMPLED_FROM_ALL

TURNS = "trainer and engines take turns on the GPUs, and who waits has its memory on the host"
OWN_GPUS = "trainer and engines have GPUs of their own, and keep their memory there"
"""The same, if engines sample ahead."""
_PACKED = "micro-batches are always packed, without padding, by tokens"
_TRAINER = "the trainer is always Megatron-core"
_SAME_SIZES = "the reference has the policy's parallel sizes and its micro-batches"
_REFIT = "every refit moves the new weights before the next rollout"
_ONE_TURN = "a response is one turn, without tools or an environment"
_NO_TEXTS = "responses are not written, only their metrics: a reward function of your own may write them"
_LOG_PROBS = "engines always say the log-probs of what they sample"

WHOLE = (
    "every rank has whole weights and gradients here, which verl cuts over ranks: megarl plan says whether they fit;"
    " megatron.use_torch_fsdp2=true cuts them, too, or tensor and expert parallelism does"
)
"""The note if verl's trainer is FSDP."""

ALWAYS: Mapping[str, str] = {
    "actor_rollout_ref.hybrid_engine": TURNS,
    "actor_rollout_ref.rollout.free_cache_engine": TURNS,
    "actor_rollout_ref.rollout.multi_stage_wake_up": TURNS,
    "actor_rollout_ref.actor.fsdp_config": _TRAINER,
    "actor_rollout_ref.ref.fsdp_config": _TRAINER,
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": _SAME_SIZES,
    "actor_rollout_ref.ref": _SAME_SIZES,
    "actor_rollout_ref.actor.data_loader_seed": "every random stream follows from loop.seed",
    "actor_rollout_ref.actor.load_weight": "weights come from model.path",
    "actor_rollout_ref.actor.megatron.seed": "every random stream follows from loop.seed",
    "actor_rollout_ref.actor.policy_loss": "it is an option of another policy loss",
    "actor_rollout_ref.actor.rollout_n": "loop.samples_per_prompt says it",
    "actor_rollout_ref.actor.tau_neg": "it is an option of another policy loss",
    "actor_rollout_ref.actor.tau_pos": "it is an option of another policy loss",
    "actor_rollout_ref.rollout.layer_name_map": _REFIT,
    "actor_rollout_ref.rollout.logprobs_mode": _LOG_PROBS,
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_tokens says it",
    "actor_rollout_ref.rollout.response_length": "rollout.max_response_tokens says it",
    "actor_rollout_ref.rollout.skip_tokenizer_init": "engines get tokens and give tokens",
    "critic.checkpoint": "a checkpoint holds model, optimizer and all random states",
    "critic.load_weight": "weights come from critic.path",
    "critic.megatron.seed": "every random stream follows from loop.seed",
    "critic.megatron.use_remove_padding": _PACKED,
    "critic.megatron.vanilla_mbridge": "weights are read and written as HuggingFace has them",
    "critic.model.tokenizer_path": "the critic has the policy's tokenizer",
    "critic.nccl_timeout": "processes that fail are noticed at once",
    "critic.rollout_n": "loop.samples_per_prompt says it",
    "reward_manager": "each response is scored as it comes",
    "trainer.ray_wait_register_center_timeout": "cluster.start_timeout_s says it",
    "actor_rollout_ref.actor.optim.optimizer": "the optimizer is Adam with decoupled weight decay",
    "actor_rollout_ref.actor.megatron.param_offload": TURNS,
    "actor_rollout_ref.actor.megatron.grad_offload": TURNS,
    "actor_rollout_ref.actor.megatron.optimizer_offload": TURNS,
    "actor_rollout_ref.actor.megatron.sequence_parallel": "it is on exactly where tensor parallelism is",
    "actor_rollout_ref.actor.megatron.use_mbridge": "weights are read and written as HuggingFace has them",
    "actor_rollout_ref.actor.megatron.vanilla_mbridge": "weights are read and written as HuggingFace has them",
    "actor_rollout_ref.actor.megatron.use_dist_checkpointing": "weights are read and written as HuggingFace has them",
    "actor_rollout_ref.actor.megatron.use_remove_padding": _PACKED,
    "actor_rollout_ref.actor.use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.actor.ppo_micro_batch_size": _PACKED,
    "actor_rollout_ref.actor.use_torch_compile": _TRAINER,
    "actor_rollout_ref.actor.checkpoint.save_contents": "a checkpoint holds model, optimizer and all random states",
    "actor_rollout_ref.actor.checkpoint.load_contents": "a checkpoint holds model, optimizer and all random states",
    "actor_rollout_ref.model.use_remove_padding": _PACKED,
    "actor_rollout_ref.model.use_fused_kernels": "log-probs are always computed a part of the vocabulary at a time",
    "actor_rollout_ref.model.fused_kernel_options": "log-probs are always computed a part of the vocabulary at a time",
    "actor_rollout_ref.rollout.layered_summon": _REFIT,
    "critic.megatron.use_dist_checkpointing": "weights are read and written as HuggingFace has them",
    "critic.megatron.dist_checkpointing_path": "weights are read and written as HuggingFace has them",
    "actor_rollout_ref.actor.megatron.dist_checkpointing_path": "weights are read and written as HuggingFace has them",
    "actor_rollout_ref.actor.profiler": "tracking.profile=STEP writes a timeline of all processes",
    "critic.profiler": "tracking.profile=STEP writes a timeline of all processes",
    "actor_rollout_ref.nccl_timeout": "processes that fail are noticed at once",
    "actor_rollout_ref.model.use_shm": _REFIT,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _PACKED,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _PACKED,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.rollout.calculate_log_probs": _LOG_PROBS,
    "actor_rollout_ref.rollout.mode": "requests are always served as they come",
    "actor_rollout_ref.rollout.load_format": _REFIT,
    "actor_rollout_ref.rollout.dtype": "engines hold what model.dtype or rollout.weights says",
    "actor_rollout_ref.rollout.do_sample": "rollouts are always sampled",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "loop.eval_temperature says whether they are sampled",
    "actor_rollout_ref.rollout.checkpoint_engine": _REFIT,
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": _REFIT,
    "actor_rollout_ref.rollout.agent.num_workers": "one process asks the engines for everything",
    "actor_rollout_ref.rollout.disable_log_stats": "it is set by the engine's own start",
    "critic.enable": "a critic is kept where the advantage needs one",
    "critic.strategy": _TRAINER,
    "critic.fsdp": _TRAINER,
    "critic.model.fsdp_config": _TRAINER,
    "critic.model.use_remove_padding": _PACKED,
    "critic.model.enable_gradient_checkpointing": "the critic recomputes as the policy does",
    "critic.use_dynamic_bsz": _PACKED,
    "critic.ppo_micro_batch_size": _PACKED,
    "critic.ppo_micro_batch_size_per_gpu": _PACKED,
    "critic.ppo_max_token_len_per_gpu": _PACKED,
    "critic.forward_max_token_len_per_gpu": _PACKED,
    "critic.forward_micro_batch_size_per_gpu": _PACKED,
    "critic.ppo_mini_batch_size": "the critic has the policy's mini-batches",
    "critic.megatron.param_offload": TURNS,
    "critic.megatron.grad_offload": TURNS,
    "critic.megatron.optimizer_offload": TURNS,
    "critic.megatron.sequence_parallel": "it is on exactly where tensor parallelism is",
    "critic.megatron.use_mbridge": "weights are read and written as HuggingFace has them",
    "critic.ulysses_sequence_parallel_size": "the critic has the policy's context parallelism",
    "data.return_raw_chat": "prompts are always chats",
    "data.reward_fn_key": "the column is always data_source",
    "data.val_batch_size": "all held-out prompts are sampled at once",
    "data.gen_batch_size": "prompts are drawn one by one as they are needed",
    "data.dataloader_num_workers": "prompts are tokenised before the run",
    "data.filter_overlong_prompts_workers": "prompts are tokenised before the run",
    "data.trust_remote_code": "only architectures that are converted are read",
    "actor_rollout_ref.model.trust_remote_code": "only architectures that are converted are read",
    "reward_model.enable": "a reward model is used where reward_model.path names one",
    "reward_model.reward_manager": "each response is scored as it comes",
    "reward_model.launch_reward_fn_async": "each response is scored as it comes",
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": "the penalty is always logged",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": "the penalty is on where its buffer is above 0",
    "reward_model.reward_kwargs.max_resp_len": "the penalty counts from rollout.max_response_tokens",
    "trainer.balance_batch": "sequences are always dealt evenly",
    "trainer.device": "the device is the one that there is",
    "trainer.use_legacy_worker_impl": _TRAINER,
    "trainer.use_v1": _TRAINER,
    "model_engine": _TRAINER,
}
"""Key of verl, or a prefix -> why it needs no note here."""

_MASKS = "masks of tokens and responses are kinds of algorithm.corrections, in docs/algorithms.md"

ABSENT: Mapping[str, str] = {
    "actor_rollout_ref.actor.ppo_epochs": "every rollout is trained on once; more algorithm.updates_per_step are the"
    " nearest",
    "actor_rollout_ref.model.mtp": "rollout.engine_args.speculative_config asks an engine for drafts of these layers",
    "actor_rollout_ref.rollout.multi_turn": _ONE_TURN,
    "actor_rollout_ref.rollout.agent": _ONE_TURN,
    "actor_rollout_ref.rollout.quantization": "rollout.engine_args.kv_cache_dtype holds keys and values in FP8, and"
    " rollout.kv_scales says with what scales",
    "actor_rollout_ref.rollout.val_kwargs": SAMPLED_FROM_ALL,
    "actor_rollout_ref.actor.router_replay": "only the experts of the rollout are replayed (R3)",
    "actor_rollout_ref.actor.freeze_vision_tower": "models of images are not trained",
    "data.image_key": "models of images are not trained",
    "data.video_key": "models of images are not trained",
    "data.custom_cls": "data is read from parquet files",
    "data.sampler": "prompts are drawn in a random order or as they lie",
    "data.truncation": "a prompt is never cut: it is refused, or dropped",
    "algorithm.rollout_correction": _MASKS,
    "algorithm.rollout_correction.rollout_is_batch_normalize": "importance weights are not brought to a mean of 1",
    "algorithm.rollout_is_veto_threshold": _MASKS,
    "algorithm.use_pf_ppo": "there is no such preference",
    **dict.fromkeys(
        (f"actor_rollout_ref.actor.checkpoint.{each}_contents" for each in ("save", "load")),
        "a checkpoint holds model, optimizer and all random states: megarl export makes a HuggingFace folder of it",
    ),
    "reward_model.reward_manager": "each response is scored by the reward function alone",
    "reward_model": "a reward model is trained by megarl reward-model and named in reward_model.path",
    "reward.sandbox_fusion": "code runs in a sandbox of this machine",
    "global_profiler": "tracking.profile=STEP writes a timeline",
    "actor_rollout_ref.rollout.skip_dump_dir": _NO_TEXTS,
    "trainer.rollout_data_dir": _NO_TEXTS,
    "trainer.validation_data_dir": _NO_TEXTS,
    "trainer.log_val_generations": _NO_TEXTS,
    "trainer.v1": "schedule.max_staleness says how far engines sample ahead",
    "trainer.resume_from_path": "a run continues from the latest checkpoint of its output_dir",
    "distillation": "teachers are given as teachers.NAME.path",
}
"""Key of verl, or a prefix, without a counterpart -> what there is instead."""


REFUSED: Mapping[str, str] = {
    "distillation.enabled": (
        "is on-policy distillation, and only RL is translated: write a recipe with teachers.NAME.path, as in"
        " quickstart_distillation"
    ),
}
"""Switch of verl -> why a command that turns it on cannot be translated."""

OF_MANAGERS = ("launch_reward_fn_async", "reward_kwargs.", "reward_manager")
"""Keys below reward_model that also apply to rule-based rewards."""

_CONTENTS = ("model", "optimizer", "extra")
ALIKE: Mapping[str, tuple[str, ...]] = {
    **{f"actor_rollout_ref.actor.checkpoint.{each}_contents": _CONTENTS for each in ("save", "load")},
    "reward_model.reward_manager": ("naive", "dapo", "batch", "prime", "rate_limited"),
}
"""Key -> its values that ask for nothing else than what is done here."""

SWITCHED: Mapping[str, str] = {
    "actor_rollout_ref.model.mtp.": "actor_rollout_ref.model.mtp.enable",
    "actor_rollout_ref.model.tiled_mlp.": "actor_rollout_ref.model.tiled_mlp.enabled",
    "actor_rollout_ref.rollout.multi_turn.": "actor_rollout_ref.rollout.multi_turn.enable",
    "actor_rollout_ref.rollout.prometheus.": "actor_rollout_ref.rollout.prometheus.enable",
    "algorithm.pf_ppo.": "algorithm.use_pf_ppo",
    "algorithm.rollout_correction.loss_type": "algorithm.rollout_correction.bypass_mode",
    "critic.model.lora.": "critic.model.lora.rank",
    "global_profiler.": "global_profiler.tool",
    "lora.": "lora.rank",
    "reward_model.sandbox_fusion.": "reward_model.sandbox_fusion.url",
    **{f"reward_model.{each}": "" for each in OF_MANAGERS},
    "reward_model.": "reward_model.enable",
}
"""Prefix of keys -> the key without which they have no effect; empty if they need none."""

NEUTRAL: Mapping[str, Any] = {
    "actor_rollout_ref.actor.optim.total_training_steps": -1,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.router_replay.mode": "disabled",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "single_turn_agent",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": 1,
    "actor_rollout_ref.rollout.scheduling_policy": "fcfs",
    "actor_rollout_ref.rollout.val_kwargs.top_k": -1,
    "actor_rollout_ref.rollout.val_kwargs.top_p": 1.0,
    "critic.loss_agg_mode": "token-mean",
    "critic.megatron.dtype": "bfloat16",
    **dict.fromkeys((f"{each}.optim.num_cycles" for each in ("actor_rollout_ref.actor", "critic")), 0.5),
    "critic.optim.optimizer": "adam",
    "critic.optim.total_training_steps": -1,
    "critic.ppo_epochs": 1,
    "data.image_key": "images",
    "data.image_patch_size": 14,
    "data.return_multi_modal_inputs": True,
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "data.video_key": "videos",
}
"""Key without a counterpart -> its value that asks for nothing."""


def reason(table: Mapping[str, str], key: str) -> str:
    """The text in a table for the key or its longest prefix; empty if there is none."""
    while key:
        if key in table:
            return table[key]
        key = key.rpartition(".")[0]
    return ""
