"""Checks a configuration: each value on its own, then combinations. Needs neither a GPU nor a model."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial, reduce
from typing import Any, get_args

from converters.errors import UserError, did_you_mean
from converters.number_formats import AS_TRAINED, NUMBER_FORMATS
from megarl.algorithms import PreferenceObjective
from megarl.algorithms.compatibility import check_each_part
from megarl.config.abilities import check_abilities
from megarl.config.composition import check_composition
from megarl.config.direct_refit import asked_of_direct
from megarl.config.input_paths import check_input_paths
from megarl.config.lora import check_lora, refuse_lora
from megarl.config.megatron import megatron_options
from megarl.config.pools import check_pools, refuse_turns
from megarl.config.purpose import say_commands
from megarl.config.schedule import check_schedule
from megarl.output.places import LOGS, check_output
from megarl.resharding.alignment import ALIGNMENT_BYTES
from megarl.resharding.direct.transports import TRANSPORTS
from megarl.resharding.direct.transports.nixl_agent import check_installed
from megarl.rollout import ENGINES
from megarl.rollout.kv_scales import KV_SCALES, with_kv_scales
from megarl.rollout.sampling import COLDEST
from megarl.schema import MegarlConfig, PreferenceConfig
from megarl.tracking import LOGGERS, check_loggers
from megatron_ext.options.options import MtpTraining

_CHOICES: Mapping[str, Collection[str]] = {
    "model.dtype": ("bf16", "fp32"),
    "model.mtp_training": get_args(MtpTraining),
    "rollout.engine": ENGINES,
    "rollout.weights": (AS_TRAINED, *NUMBER_FORMATS),
    "rollout.kv_scales": KV_SCALES,
    "algorithm.router_replay": ("none", "rollout"),
    "schedule.in_flight": ("wait", "recompute", "keep"),
    "refit.path": ("auto", "direct", "loader"),
    "refit.transport": ("auto", *TRANSPORTS),
    "refit.verify": ("checksum", "logprobs", "off"),
    "reward.on_error": ("stop", "drop"),
    "reward.on_timeout": ("stop", "drop", "zero"),
    "data.overlong_prompts": ("refuse", "drop"),
    "checkpoint.resume": ("auto", "never"),
}
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "rollout.weights": {"fp8": "fp8_block", "int8": "int8_channel", "bf16": AS_TRAINED, "auto": AS_TRAINED},
}
"""Key -> values of other programs and our equivalents, which a similarity of names would not suggest."""
_AT_LEAST: Mapping[str, float] = {
    **dict.fromkeys(("rollout.temperature", "loop.eval_temperature"), COLDEST),
    "lora.rank": 0,
    "cluster.nodes": 1,
    "rollout.replicas": 1,
    "rollout.max_response_tokens": 1,
    "refit.bucket_bytes": ALIGNMENT_BYTES,
    **dict.fromkeys(("reward.workers", "reward.async_samples"), 1),
    "reward.overlong_buffer_tokens": 0,
    "reward.overlong_penalty": 0,
    "algorithm.kl_horizon": 1,
    "algorithm.refresh_reference_every": 0,
    "algorithm.max_refills": 0,
    "critic.ranks": 1,
    "critic.warmup_steps": 0,
    "reward_model.ranks": 1,
    "implicit_reward_model.ranks": 1,
    "algorithm.entropy_coefficient": 0,
    "algorithm.updates_per_step": 1,
    "data.max_prompt_tokens": 1,
    "loop.steps": 1,
    "loop.prompts_per_step": 1,
    "loop.samples_per_prompt": 1,
    "loop.max_tokens_per_micro_batch": 1,
    "loop.eval_every": 0,
    "loop.eval_samples": 1,
    "loop.seed": 0,
    "schedule.max_staleness": 0,
    "schedule.window": 1,
    "sft.steps": 1,
    "sft.sequences_per_step": 1,
    "sft.eval_every": 1,
    "sft.stop_at_exact_match": 0,
    **dict.fromkeys(
        (f"preference.{name}" for name in ("steps", "pairs_per_step", "eval_every", "steps_per_generation")), 1
    ),
    "cluster.trainer_ranks": 1,
    "cluster.engine_threads": 1,
    "cluster.max_engine_restarts": 0,
    "cluster.max_restarts": 0,
    "cluster.rendezvous_port": 0,
    "cluster.device_memory_bytes": 1,
    # Ray (2.60) refuses a smaller object store.
    "cluster.object_store_bytes": 75 * 1024**2,
    "checkpoint.every": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 0,
    "tracking.warn_after_steps": 1,
    "tracking.profile": 1,
}
_ABOVE_ZERO = (
    "lora.alpha",
    "rollout.top_p",
    "reward.timeout_s",
    "critic.value_clip",
    "implicit_reward_model.beta",
    "cluster.trainer_cpus",
    "cluster.engine_cpus",
    "cluster.gpu_share",
    "cluster.start_timeout_s",
    "cluster.silence_timeout_s",
    "cluster.engine_start_timeout_s",
    "cluster.collective_timeout_s",
    "refit.timeout_s",
    "refit.log_prob_tolerance",
    "tracking.peak_tflops",
)
_AT_MOST: Mapping[str, int] = {
    "rollout.top_p": 1,
    "sft.stop_at_exact_match": 1,
    **dict.fromkeys(("reward.workers", "reward.async_samples"), 10_000),
    "cluster.rendezvous_port": 65535,
    # Kernels count the words of a bucket in int32.
    "refit.bucket_bytes": 4 * 1024**3,
}
_MOST_PROCESSES_HERE = 1024
"""Maximum number of ranks and engines on one machine."""
_MEGATRON_BETWEEN: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("lr", "min_lr", "weight_decay", "clip_grad", "lr_warmup_steps"), (0.0, math.inf)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0.0, 1.0)),
}


def validate(config: MegarlConfig, command: str) -> None:
    """Raise UserError for the first value with which `megarl COMMAND` could not work."""
    check_single_values(config)
    _check_job(config)
    check_input_paths(config, command)
    for check in CHECKS[command]:
        check(config)


def check_planned(config: MegarlConfig) -> None:
    """Raise UserError for the first value with which `megarl train` could not work on any machine and with any data."""
    check_single_values(config)
    _check_pairs(config)
    for check in _POLICY:
        check(config)


def check_single_values(config: MegarlConfig) -> None:
    """Raise UserError for the first value that is invalid on its own, whatever the other values and the machine are."""
    _check_finite("", asdict(config))
    for key, names in _CHOICES.items():
        _check_choice(key, _value(config, key), names)
    for logger in config.tracking.loggers:
        _check_choice("tracking.loggers", logger, LOGGERS)
    for key, minimum in _AT_LEAST.items():
        if (value := _value(config, key)) is not None and value < minimum:
            raise UserError(f"{key}={value} is too small: it must be at least {minimum}")
    for key in _ABOVE_ZERO:
        if (value := _value(config, key)) is not None and value <= 0:
            raise UserError(f"{key}={value} is too small: it must be above 0")
    for key, maximum in _AT_MOST.items():
        if (value := _value(config, key)) is not None and value > maximum:
            raise UserError(f"{key}={value} is too large: it must be at most {maximum}")
    for name, teacher in config.teachers.items():
        if teacher.ranks is not None and teacher.ranks < 1:
            raise UserError(f"teachers.{name}.ranks={teacher.ranks} is too small: it must be at least 1")
    if config.rollout.top_k != -1 and config.rollout.top_k < 1:
        raise UserError(f"rollout.top_k={config.rollout.top_k}: it must be at least 1, or -1 for every token")
    if negative := [token for token in config.rollout.stop_token_ids if token < 0]:
        raise UserError(f"rollout.stop_token_ids has {negative[0]}, and no token has a number below 0")
    check_each_part(config.algorithm)


def _check_job(config: MegarlConfig) -> None:
    processes = config.cluster.trainer_ranks + config.rollout.replicas
    if config.cluster.address is None and processes > _MOST_PROCESSES_HERE:
        raise UserError(
            f"cluster.trainer_ranks={config.cluster.trainer_ranks} and rollout.replicas={config.rollout.replicas} are "
            f"more than {_MOST_PROCESSES_HERE} processes on this machine alone: name a cluster in cluster.address"
        )
    if config.cluster.address is None and (config.cluster.nodes or 1) > 1:
        raise UserError(
            f"cluster.nodes={config.cluster.nodes} waits for machines, and the run has this one alone: set"
            " cluster.address to their Ray cluster"
        )
    if config.cluster.address is not None and config.cluster.object_store_bytes is not None:
        raise UserError(
            "cluster.object_store_bytes is for a cluster that the run starts, and cluster.address names one that is"
            " there: leave the former out, and start the latter's nodes with ray start --object-store-memory"
        )
    _check_pairs(config)
    check_loggers(config.tracking.loggers)
    if config.refit.transport == "rdma":
        check_installed()


def _check_pairs(config: MegarlConfig) -> None:
    """Raise UserError for values of a job that contradict each other on any machine."""
    check_pools(config)
    with_kv_scales(config.rollout, config.rollout.engine_args)
    _check_direct(config)


def _check_direct(config: MegarlConfig) -> None:
    """Raise UserError if one key requires direct refits and another rules them out."""
    weights = NUMBER_FORMATS.get(config.rollout.weights)
    for key, without in asked_of_direct(config.refit).items():
        if config.refit.path == "loader":
            raise UserError(
                f"{key} is for direct refits, and refit.path=loader allows none: set refit.path to auto, or {without}"
            )
        if weights and weights.elements_per_code > 1:
            raise UserError(
                f"{key} is for direct refits, and engines take rollout.weights={config.rollout.weights} through their "
                "own loader only: leave it out"
            )


def _check_finite(key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, each in value.items():
            _check_finite(f"{key}.{name}" if key else name, each)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value} is no number to work with: give a finite one")


def _check_choice(key: str, value: str, names: Collection[str]) -> None:
    if value not in names:
        meant = _ALIASES.get(key, {}).get(value, value)
        raise UserError(f"{key}={value} is none of {', '.join(sorted(names))}{did_you_mean(meant, names)}")


def _check_megatron(config: MegarlConfig) -> None:
    megatron_options(config)
    options = config.megatron
    if not options.get("lr"):
        raise UserError("megatron.lr is not set: give the learning rate, for instance as --lr 1e-6")
    for name, (smallest, largest) in _MEGATRON_BETWEEN.items():
        value = options.get(name)
        if value is not None and not smallest <= value <= largest:
            bounds = f"at least {smallest:g}" + (f" and at most {largest:g}" if largest < math.inf else "")
            raise UserError(f"megatron.{name}={value} cannot be: it must be {bounds}")
    if (options.get("min_lr") or 0.0) > options["lr"]:
        raise UserError(f"megatron.min_lr={options['min_lr']} is above megatron.lr={options['lr']}: lower it")
    warmup, decay = options.get("lr_warmup_steps") or 0, options.get("lr_decay_steps")
    if decay is not None and warmup >= decay:
        raise UserError(
            f"megatron.lr_warmup_steps={warmup} leaves no step of megatron.lr_decay_steps={decay}, which counts them,"
            " too: lower the one or raise the other"
        )


def _check_preferences(config: MegarlConfig) -> None:
    PreferenceObjective(config.preference.beta, config.preference.label_smoothing)


def _refuse_joint_prediction(config: MegarlConfig) -> None:
    if config.model.mtp_training == "joint":
        raise UserError(
            "model.mtp_training=joint adds the prediction layers' cross entropy to what the policy learns, and megarl"
            " dpo and spin teach it preferences alone: set it to detached, or none"
        )


def _refuse_preferences_of_others(config: MegarlConfig, command: str) -> None:
    """Raise UserError for a key of `preference` that is set and that `command` does not read."""
    for name, commands in _PREFERENCES_OF.items():
        value = getattr(config.preference, name)
        if command not in commands and value != getattr(PreferenceConfig(), name):
            raise UserError(
                f"preference.{name}={value} is for {say_commands(commands)}, and has no effect in megarl {command}:"
                " leave it out"
            )


def _check_step(config: MegarlConfig) -> None:
    loop, algorithm = config.loop, config.algorithm
    if loop.prompts_per_step % algorithm.updates_per_step:
        raise UserError(
            f"loop.prompts_per_step={loop.prompts_per_step} cannot be cut into algorithm.updates_per_step="
            f"{algorithm.updates_per_step} equal mini-batches; change one of the two"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > loop.max_tokens_per_micro_batch:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} does not fit in"
            f" loop.max_tokens_per_micro_batch={loop.max_tokens_per_micro_batch}; raise the latter to {longest}"
        )


def _check_logs(config: MegarlConfig) -> None:
    check_output(config, written=(LOGS,))


def _value(config: MegarlConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


_PREFERENCES_OF: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("beta", "label_smoothing"), ("dpo", "spin")),
    **dict.fromkeys(("prompt_column", "chosen_column", "rejected_column"), ("dpo", "reward-model")),
    **dict.fromkeys(("messages_column", "steps_per_generation"), ("spin",)),
}
"""Keys of `preference` that not all of its commands read -> those that do."""
_POLICY = (_check_megatron, check_lora, check_composition, check_schedule, check_abilities, _check_step)
_TRAINING = (check_output, _check_megatron, check_lora)
_PREFERENCES: Mapping[str, Sequence[Callable[[MegarlConfig], None]]] = {
    command: (*_TRAINING, _check_preferences, partial(_refuse_preferences_of_others, command=command))
    for command in ("dpo", "reward-model", "spin")
}
CHECKS: Mapping[str, Sequence[Callable[[MegarlConfig], None]]] = {
    "train": (check_output, *_POLICY),
    "sft": _TRAINING,
    "dpo": (*_PREFERENCES["dpo"], _refuse_joint_prediction),
    "reward-model": (*_PREFERENCES["reward-model"], refuse_lora),
    "spin": (*_PREFERENCES["spin"], refuse_turns, _refuse_joint_prediction),
    "eval": (_check_logs,),
    "chat": (_check_logs,),
}
"""Command -> the checks after those of single values' ranges."""
