"""`megarl config --from-verl`: a recipe equivalent to a verl command, and what has no counterpart."""

from collections.abc import Mapping, Sequence
from typing import Any

from converters.errors import UserError
from megarl.config.foreign import verl_keys as verl
from megarl.config.foreign import verl_notes
from megarl.config.foreign.engine_arguments import EXPERT_PARALLEL, OF_VERL, TENSOR_PARALLEL
from megarl.config.foreign.recipe import OPEN, WITHOUT_LIMIT, TranslatedRecipe, steps_of_epochs
from megarl.config.foreign.verl_settings import read_settings
from megarl.config.foreign.verl_trainers import critic, megatron, optimizer
from megarl.config.foreign.verl_translation import ACTOR, ALGORITHM, CORRECTION, ROLLOUT, Translation
from megarl.rollout import ENGINES


def from_verl(given: Sequence[str], environment: Mapping[str, str]) -> TranslatedRecipe:
    """Translate a file or overrides. Raises UserError for a value that cannot be translated."""
    settings = read_settings(given, environment)
    translation = Translation(settings.values, settings.trainer)
    for key, why in verl_notes.REFUSED.items():
        if translation.take(key):
            raise UserError(f"{key}={settings.values[key]} {why}")
    translation.recipe.absent.update(settings.lost)
    for part in (_model, _data, _rollout, _algorithm, _kl, _corrections, _run, optimizer, critic, _reward, _cluster):
        part(translation)
    return translation.finish()


def _model(t: Translation) -> None:
    t.recipe.set("model.path", t.take("actor_rollout_ref.model.path", OPEN))
    if t.given.get("lora.rank") and not t.has("lora.adapter_path"):
        t.recipe.set("lora.alpha", t.take("lora.alpha"))
    if t.given.get("lora.rank") or t.has("lora.adapter_path"):
        # Adapters do not support the modules of Transformer Engine, which GPUs use where it is installed.
        t.recipe.set("megatron.transformer_impl", "local")
    if t.has("lora.target_modules"):
        modules = t.take("lora.target_modules")
        t.recipe.set("lora.target_modules", [modules] if isinstance(modules, str) else list(modules))
    strategy = t.take(f"{ACTOR}strategy")
    is_megatron = strategy == "megatron" or bool(t.names_below(f"{ACTOR}megatron."))
    if not is_megatron:
        t.recipe.absent[verl_notes.WHOLE] = [f"{ACTOR}strategy={strategy}"]
    megatron(t, "megatron", f"{ACTOR}megatron.")
    if t.has(dtype := f"{ACTOR}megatron.dtype"):
        t.recipe.set("model.dtype", t.choose(dtype, verl.DTYPES))
    _prediction_layers(t)
    if t.has(size := f"{ACTOR}ulysses_sequence_parallel_size"):
        t.recipe.set("megatron.context_parallel_size", t.take(size))
    # verl's Megatron trainer recomputes according to override_transformer_config, its FSDP trainer by this key.
    recomputes = t.take("actor_rollout_ref.model.enable_gradient_checkpointing")
    if recomputes and not is_megatron:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        for name, value in recompute.items():
            t.recipe.set(f"megatron.{name}", value)


def _prediction_layers(t: Translation) -> None:
    """Translate multi-token-prediction layers, which verl has and trains only if told to."""
    below = "actor_rollout_ref.model.mtp."
    if not t.take(f"{below}enable"):
        return
    names = ("enable_train", "detach_encoder", "mtp_loss_scaling_factor")
    trains, is_detached, factor = (t.take(below + name) for name in names)
    t.recipe.set("model.mtp_training", "none" if not trains else "detached" if is_detached else "joint")
    if trains and factor is not None:
        t.recipe.set("megatron.mtp_loss_scaling_factor", factor)


def _data(t: Translation) -> None:
    for key, name in (("data.train_files", "data.train_files"), ("data.val_files", "data.eval_files")):
        files = t.take(key)
        if files is not None:
            t.recipe.set(name, [files] if isinstance(files, str) and files != OPEN else files)
    t.recipe.set("data.max_prompt_tokens", t.take("data.max_prompt_length"))
    t.recipe.set("rollout.max_response_tokens", t.take("data.max_response_length"))
    t.recipe.set("data.overlong_prompts", "drop" if t.take("data.filter_overlong_prompts") else "refuse")
    if t.take("data.truncation") in (None, "error"):
        return
    t.absent("data.truncation", verl_notes.ABSENT["data.truncation"])


def _rollout(t: Translation) -> None:
    engine = t.take(f"{ROLLOUT}name")
    if engine not in OF_VERL:
        raise UserError(f"{ROLLOUT}name={engine} is none of the engines that can be translated: {', '.join(OF_VERL)}")
    t.recipe.set("rollout.engine", engine)
    arguments = {TENSOR_PARALLEL[engine]: t.count(f"{ROLLOUT}tensor_model_parallel_size")}
    for name, argument in OF_VERL[engine].items():
        if (value := t.take(f"{ROLLOUT}{name}")) is not None:
            arguments[argument] = value
    experts = t.take(f"{ROLLOUT}expert_parallel_size", 1)
    if experts > 1:
        name, is_switch = EXPERT_PARALLEL[engine]
        arguments[name] = True if is_switch else experts
    known = ENGINES[engine].arguments()
    for name in t.names_below(below := f"{ROLLOUT}engine_kwargs.{engine}."):
        if known and name not in known:
            t.absent(below + name, "the installed engine has no such argument")
        else:
            arguments[name] = (t.count if name == TENSOR_PARALLEL[engine] else t.take)(below + name)
    # Otherwise engines would require room for the model's own maximum length, which may be 30 times as much.
    arguments.setdefault(ENGINES[engine].context_argument, _longest(t))
    t.recipe.set("rollout.engine_args", arguments)
    quantization = t.take(f"{ROLLOUT}quantization")
    if quantization == "fp8":
        t.recipe.set("rollout.weights", "fp8_block")
    elif quantization is not None:
        from converters.number_formats import NUMBER_FORMATS  # imports torch, which takes seconds

        t.absent(f"{ROLLOUT}quantization", f"rollout.weights has {', '.join(NUMBER_FORMATS)}")
    if t.take(f"{ROLLOUT}enable_rollout_routing_replay") or t.given.get(f"{ACTOR}router_replay.mode") == "R3":
        t.take(f"{ACTOR}router_replay.mode")
        t.recipe.set("algorithm.router_replay", "rollout")
    samples, temperature = t.take(f"{ROLLOUT}val_kwargs.n", 1), t.take(f"{ROLLOUT}val_kwargs.temperature", 0)
    t.recipe.evaluate_with(samples, temperature, [f"{ROLLOUT}val_kwargs.n={samples}"])


def _longest(t: Translation) -> int:
    """Tokens of the longest prompt plus the longest response."""
    return int(t.recipe.get("data.max_prompt_tokens") + t.recipe.get("rollout.max_response_tokens"))


def _algorithm(t: Translation) -> None:
    advantage = t.choose(f"{ALGORITHM}adv_estimator", verl.ADVANTAGES)
    options = {
        "gae": {"gamma": "gamma", "gae_lambda": "lam"},
        "reinforce_plus_plus": {"gamma": "gamma"},
        **{name: {"normalize_by_std": "norm_adv_by_std_in_grpo"} for name in verl.NORMALIZED},
    }.get(advantage, {})
    t.recipe.set("algorithm.advantage", advantage)
    for name in ("gamma", "lam", "norm_adv_by_std_in_grpo"):
        t.take(ALGORITHM + name)
    for option, name in options.items():
        if (value := t.take(ALGORITHM + name)) is not None:
            t.recipe.set(f"algorithm.advantage_options.{option}", value)
    loss = t.choose(f"{ACTOR}policy_loss.loss_mode", verl.POLICY_LOSSES)
    if t.take(f"{CORRECTION}bypass_mode"):
        loss = t.choose(f"{CORRECTION}loss_type", verl.BYPASS_LOSSES)
    t.recipe.set("algorithm.policy_loss", loss)
    clip, dual = t.take(f"{ACTOR}clip_ratio"), t.take(f"{ACTOR}clip_ratio_c")
    low, high = t.take(f"{ACTOR}clip_ratio_low", clip), t.take(f"{ACTOR}clip_ratio_high", clip)
    if loss in verl.CLIPPED:
        t.recipe.set("algorithm.policy_loss_options.clip_low", min(low, 1.0) if loss in verl.OPEN_BELOW else low)
        t.recipe.set("algorithm.policy_loss_options.clip_high", high)
    if loss in verl.CLIPPED_AGAIN:
        t.recipe.set(f"algorithm.policy_loss_options.{verl.CLIPPED_AGAIN[loss]}", dual)
    for key, option in verl.POLICY_LOSS_OPTIONS.get(loss, {}).items():
        if t.has(key):
            t.recipe.set(f"algorithm.policy_loss_options.{option}", t.take(key))
    aggregation = t.choose(f"{ACTOR}loss_agg_mode", verl.AGGREGATIONS)
    t.recipe.set("algorithm.aggregation", verl.AGGREGATED.get(loss, aggregation))
    if t.has(f"{ACTOR}loss_scale_factor"):
        t.recipe.set("algorithm.aggregation_options.length", t.take(f"{ACTOR}loss_scale_factor"))
    metric, batches = (t.take(f"{ALGORITHM}filter_groups.{name}") for name in ("metric", "max_num_gen_batches"))
    if t.take(f"{ALGORITHM}filter_groups.enable"):
        metric = metric or "acc"
        t.recipe.set("algorithm.filter_on", verl.FILTERS.get(metric, metric))
        t.recipe.set("algorithm.max_refills", _refills(t, batches or 0))


def _refills(t: Translation, batches: int) -> int:
    """Prompts that may be replaced per step, in multiples of a step's prompts; verl counts the batches drawn for it."""
    if batches <= 0:
        return WITHOUT_LIMIT
    if not t.trainer.draws_batches:
        t.without_effect(f"{ALGORITHM}filter_groups.max_num_gen_batches", "verl.trainer.main_ppo draws without a limit")
        return WITHOUT_LIMIT
    trained, drawn = _batches(t)
    return max(0, batches * drawn // trained - 1)


def _batches(t: Translation) -> tuple[int, int]:
    """Number of prompts that a step trains on, and of a drawn batch, by which epochs are counted."""
    trained = t.count("data.train_batch_size")
    drawn = t.count("data.gen_batch_size") if t.has("data.gen_batch_size") else trained
    filters = t.take(f"{ALGORITHM}filter_groups.enable")
    if not t.trainer.draws_batches:
        drawn = trained if filters else max(trained, drawn)
    return (trained if filters else drawn), drawn


def _kl(t: Translation) -> None:
    in_loss, in_reward = t.take(f"{ACTOR}use_kl_loss"), t.take(f"{ALGORITHM}use_kl_in_reward")
    coefficient = t.take(f"{ACTOR}kl_loss_coef")
    estimator = f"{ACTOR}kl_loss_type"
    target, horizon = (t.take(f"{ALGORITHM}kl_ctrl.{name}") for name in ("target_kl", "horizon"))
    adaptive = t.take(f"{ALGORITHM}kl_ctrl.type") == "adaptive"
    reward_coefficient = t.take(f"{ALGORITHM}kl_ctrl.kl_coef")
    if in_reward and in_loss:
        t.absent(f"{ALGORITHM}use_kl_in_reward", "the KL is in the loss or in the reward, and here it is in the loss")
    elif in_reward:
        coefficient, estimator = reward_coefficient, f"{ALGORITHM}kl_penalty"
        t.recipe.set("algorithm.kl_in", "reward")
    for key in (f"{ACTOR}kl_loss_type", f"{ALGORITHM}kl_penalty"):
        t.take(key)
    if not (in_loss or in_reward) or not coefficient:
        return
    t.recipe.set("algorithm.kl_coefficient", coefficient)
    t.recipe.set("algorithm.kl_estimator", t.choose(estimator, verl.KL_ESTIMATORS))
    if in_reward and adaptive and not in_loss:
        t.recipe.set("algorithm.kl_target", target)
        t.recipe.set("algorithm.kl_horizon", horizon)


def _corrections(t: Translation) -> None:
    """Translate importance weights, by the keys of three versions of verl."""
    corrections = _by_level(t)
    if (cap := t.take(f"{ACTOR}tis_imp_ratio_cap", -1)) > 0:
        corrections = [{"kind": "token_importance", "high": cap}]
    bounds, bypasses = t.take(f"{CORRECTION}rollout_is_threshold", 2.0), t.take(f"{CORRECTION}bypass_mode")
    if t.has(name := f"{CORRECTION}rollout_is"):
        corrections = _weights(t.choose(name, verl.CORRECTIONS), bounds)
        if bypasses and t.recipe.get("algorithm.policy_loss") == "clip":
            corrections = []
            t.without_effect(name, "the ratio to the rollout is in the loss, and weighs no second time")
    if corrections:
        t.recipe.set("algorithm.corrections", corrections)
    if bypasses:
        t.recipe.set("algorithm.ratio_to", "rollout")


def _weights(kind: str, bounds: Any) -> list[dict[str, Any]]:
    """Weights truncated at a bound or, with `LOW_HIGH`, without those outside the two bounds."""
    low, between, high = str(bounds).partition("_")
    try:
        if not between:
            return [{"kind": kind, "high": float(bounds)}]
        band = {"low": float(low), "high": float(high)}
    except ValueError as error:
        raise UserError(
            f"{CORRECTION}rollout_is_threshold={bounds} is neither a bound nor two, such as 2.0 or 0.5_5.0: change it"
        ) from error
    if kind == "token_importance":
        return [{"kind": "icepop", **band}]
    return [{"kind": kind, "high": band["high"]}, {"kind": "sequence_band", **band}]


def _by_level(t: Translation) -> list[dict[str, Any]]:
    """The weights of verl 0.6.0, which only monitors ratios where it does not apply them."""
    below = f"{ALGORITHM}rollout_is"
    high, low = t.take(f"{below}_threshold"), t.take(f"{below}_threshold_lower")
    level, last = t.choose(f"{below}_level", verl.LEVELS), t.choose(f"{below}_mode", verl.MODES)
    if not t.take(below) or high is None:
        return []
    weights = {"kind": f"{level}_importance", "high": high}
    if last == "importance":
        return [weights]
    return [weights, {"kind": f"{level}_{last}", "low": 1 / high if low is None else low, "high": high}]


def _reward(t: Translation) -> None:
    path, name = t.take("custom_reward_function.path"), t.take("custom_reward_function.name", "compute_score")
    has_model = t.take("reward_model.enable")
    if has_model and not path:
        _reward_model(t)
    elif path:
        for each in t.names_below("reward_model.") if has_model else ():
            if not each.startswith(verl_notes.OF_MANAGERS):
                t.absent(f"reward_model.{each}", "the function asks this model as a server, which you start yourself")
        t.recipe.set("reward.function", f"{path}:{name}")
        why = "an async function scores reward.async_samples samples at a time, verl's all; reward.workers is of others"
        t.recipe.always[why] = [f"custom_reward_function.path={path}"]
    else:
        for reward, sources in verl.REWARDS.items():
            t.recipe.set(f"reward.functions.{reward}", {"function": reward, "data_sources": list(sources)})
        shown = [f"data_source={each}" for each in verl.REWARDS[verl.FROM_MINUS_ONE]]
        t.recipe.weigh_twice(verl.FROM_MINUS_ONE, shown, "verl")
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg."
    enabled = t.take(f"{overlong}enable")
    tokens, penalty = t.take(f"{overlong}len"), t.take(f"{overlong}penalty_factor", 1.0)
    if enabled and tokens:
        t.recipe.set("reward.overlong_buffer_tokens", tokens)
        t.recipe.set("reward.overlong_penalty", penalty)


def _reward_model(t: Translation) -> None:
    """Translate a reward model, whose score verl uses alone; here, a rule of any weight would be added to it."""
    t.recipe.set("reward_model.path", t.take(path := "reward_model.model.path", OPEN))
    if t.has(path):
        t.absent(path, "it reads the policy's tokens, and so has to have the policy's vocabulary; verl gives it text")
    t.recipe.set("reward.functions.rule", {"function": "exact_match", "weight": 0.0})
    if t.recipe.get("loop.eval_every"):
        t.recipe.set("loop.eval_every", 0)
        t.absent("trainer.test_freq", "held-out responses are scored by rules alone, and none has weight here")


def _run(t: Translation) -> None:
    (prompts, drawn), samples = _batches(t), t.count(f"{ROLLOUT}n")
    t.recipe.set("loop.prompts_per_step", prompts)
    if prompts != t.take("data.train_batch_size"):
        t.without_effect("data.train_batch_size", "without a filter, verl trains on all prompts of data.gen_batch_size")
    t.recipe.set("loop.samples_per_prompt", samples)
    longest = _longest(t)
    if t.given.get(f"{ACTOR}use_dynamic_bsz") or not t.has(f"{ACTOR}ppo_micro_batch_size_per_gpu"):
        tokens = t.take(f"{ACTOR}ppo_max_token_len_per_gpu") * t.recipe.get("megatron.context_parallel_size", 1)
    else:
        tokens = t.take(f"{ACTOR}ppo_micro_batch_size_per_gpu") * longest
    for name in ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"):
        t.take(ACTOR + name)
    t.recipe.set("loop.max_tokens_per_micro_batch", max(tokens, longest))
    steps, epochs = t.take("trainer.total_training_steps"), t.take("trainer.total_epochs")
    by_epochs = steps_of_epochs(t.recipe.get("data.train_files"), epochs, drawn)
    t.schedule_length = steps or by_epochs
    # In verl, the loop also ends with the epochs, and the learning rate is scheduled for all steps.
    t.recipe.set("loop.steps", min(steps, by_epochs) if steps and by_epochs != OPEN else t.schedule_length)
    t.recipe.set("loop.eval_every", max(0, t.take("trainer.test_freq")))
    saved = max(0, t.take("trainer.save_freq"))
    t.recipe.set("checkpoint.every", saved)
    if saved and not t.take("trainer.max_actor_ckpt_to_keep"):
        t.recipe.set("checkpoint.keep_every", saved)
    if t.take("trainer.resume_mode") == "disable":
        t.recipe.set("checkpoint.resume", "never")
    loggers = t.take("trainer.logger")
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    t.recipe.set("tracking.loggers", ["jsonl", *(each for each in loggers if each in verl.LOGGERS)])
    if others := [each for each in loggers if each not in verl.LOGGERS]:
        t.recipe.absent.setdefault("loggers are console, jsonl, tensorboard, wandb and mlflow", []).extend(others)
    project, run = t.take("trainer.project_name"), t.take("trainer.experiment_name")
    folder = t.take("trainer.default_local_dir", OPEN if OPEN in (project, run) else f"checkpoints/{project}/{run}")
    t.recipe.set("output_dir", folder)
    for key, value in (("tracking.project", project), ("tracking.run_name", run)):
        if value != OPEN:
            t.recipe.set(key, value)


def _cluster(t: Translation) -> None:
    """Translate verl's hybrid engine: trainer and engines take turns on the same GPUs, or engines sample ahead."""
    nodes, gpus = t.count("trainer.nnodes"), t.count("trainer.n_gpus_per_node")
    engine_nodes, engine_gpus = nodes, gpus
    if t.trainer.samples_ahead:
        engine_nodes, engine_gpus = t.count("rollout.nnodes"), t.count("rollout.n_gpus_per_node")
    engine = t.recipe.get("rollout.engine")
    size = t.recipe.get(f"rollout.engine_args.{TENSOR_PARALLEL[engine]}")
    if (engine_nodes * engine_gpus) % size:
        raise UserError(
            f"{engine_nodes * engine_gpus} GPUs cannot be shared out among engines of {size}: change one of the two"
        )
    t.recipe.set("cluster.trainer_ranks", nodes * gpus)
    t.recipe.set("rollout.replicas", engine_nodes * engine_gpus // size)
    models = {"critic": t.recipe.get("algorithm.advantage") == "gae", "reward_model": t.recipe.get("reward_model.path")}
    roles = ["trainer", "engine", *(role for role, is_there in models.items() if is_there)]
    if t.trainer.samples_ahead:
        if roles[2:]:
            raise UserError(
                f"one_step_off_policy keeps the {roles[2]} on the trainer's GPUs while engines sample ahead, and here"
                " it would need GPUs of its own: write a recipe with a pool of cluster.pools for it"
            )
        t.recipe.set("cluster.pools.trainer", {"roles": ["trainer"], "nodes": nodes, "gpus": gpus})
        t.recipe.set("cluster.pools.engine", {"roles": ["engine"], "nodes": engine_nodes, "gpus": engine_gpus})
        t.recipe.sample_ahead()
    else:
        t.recipe.set("cluster.pools.all", {"roles": roles, "nodes": nodes, "shared": True})
    for name in ("data_parallel_size", "pipeline_model_parallel_size"):
        if t.given.get(ROLLOUT + name, 1) != 1:
            t.absent(ROLLOUT + name, "an engine is one group of tensor parallelism, and there are more of them")
    t.take(f"{ROLLOUT}data_parallel_size")
