"""Options that `megarl plan` takes from a recipe: the model, and the sizes of trainer and engines."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from converters.errors import UserError, did_you_mean
from megarl.cli import plan_step, recipe
from megarl.cli.parallel_options import SIZES
from megarl.planning.amounts import read_bytes
from megarl.rollout import engine_kind
from megarl.schema import RolloutConfig

if TYPE_CHECKING:
    from converters.architectures import Lora
    from converters.number_formats import NumberFormat
    from megarl.schema import MegarlConfig

_ENGINE = engine_kind(RolloutConfig().engine)
WITHOUT_A_RECIPE: Mapping[str, Any] = {
    **{size.name: size.default for size in SIZES},
    "use_torch_fsdp2": False,
    "gpus": None,
    "engine_tp": 1,
    "engine_ep": None,
    "engine_dtype": None,
    "replicas": 1,
    "bucket_bytes": 512 * 10**6,
    "colocated": False,
    "staleness": 0,
    "megatron": {},
    "training_dtype": "bf16",
    "lora": None,
    "mtp_training": "detached",
    "keeps_reference": False,
    "memory_share": partial(_ENGINE.memory_share, {}),
    "computes_beside": _ENGINE.computes_beside,
    "prefill_tokens": _ENGINE.prefill_tokens({}),
    "most_samples": _ENGINE.max_concurrent_samples({}) or inf,
    "is_eager": False,
    "kv_bytes": 2,
    "kv_ranks": 1,
    "sends_whole_tensors": False,
    "not_planned": {},
    **plan_step.WORK_OF_A_STEP,
}
"""The options that a recipe may set -> their defaults, if neither a recipe nor the command line sets them."""
_TRAINER = {**{size.name: size.field for size in SIZES}, "use_torch_fsdp2": "use_torch_fsdp2"}
"""Option -> key of the group `megatron`."""
SEARCHED = (*(size.name for size in SIZES), "engine_tp", "engine_ep", "replicas")
"""The options that `--search` proposes, starting from those of the recipe."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, after those that a recipe may set."""
    group = parser.add_argument_group("recipe")
    group.add_argument(
        "--config-name", metavar="NAME", help="take model and sizes from a recipe of megarl train; options win over it"
    )
    group.add_argument("--config-dir", metavar="DIR", help="folder of your own recipes, looked in first")
    # None marks options that are not given.
    parser.set_defaults(model=None, **dict.fromkeys(WITHOUT_A_RECIPE))


def _bucket_bytes(text: str) -> int:
    return read_bytes(text, "--bucket-bytes")


def _engine_dtype(text: str) -> "NumberFormat | None":
    """The number format of the engines' matrices, None for bf16; "fp8" is short for block FP8."""
    from converters.number_formats import FP8_BLOCK, NUMBER_FORMATS

    known = {"bf16": None, "fp8": FP8_BLOCK, **NUMBER_FORMATS}
    if text not in known:
        raise UserError(f"--engine-dtype {text} is none of {', '.join(known)}{did_you_mean(text, known)}")
    return known[text]


_READERS: Mapping[str, Callable[[str], Any]] = {"bucket_bytes": _bucket_bytes, "engine_dtype": _engine_dtype}
"""Option given as text on the command line and as a value by a recipe -> parser of the text."""


def check_overrides(options: argparse.Namespace) -> None:
    """Raise UserError for an override or a flag without a recipe to apply it to."""
    if options.config_name or not options.overrides:
        return
    word = options.overrides[0]
    if options.parser.nearest(word):
        raise options.parser.no_option(word)
    raise UserError(f"megarl plan takes {word} only with a recipe: give --config-name, too")


def complete(options: argparse.Namespace) -> None:
    """Parse the options that are texts, and take options missing on the command line from the recipe.

    Without a recipe they are those of `WITHOUT_A_RECIPE`. Raises UserError for an invalid text, or without a model.
    """
    found = dict(WITHOUT_A_RECIPE)
    if options.config_name:
        found |= _sizes(options)
    for name, value in found.items():
        if (given := getattr(options, name)) is None:
            setattr(options, name, value)
        elif name in _READERS:
            setattr(options, name, _READERS[name](given))
    if options.model is None:
        raise UserError("megarl plan needs a model: give --model, or a recipe with --config-name")


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    from megarl.algorithms import PolicyObjective
    from megarl.config.pools import take_turns
    from megarl.config.purpose import check_plannable
    from megarl.config.validate import check_single_values

    config = recipe.read_open(options)
    check_plannable(config, options.config_name, options.command)
    check_single_values(config)
    if not config.lora.merge:
        raise UserError(
            "megarl plan counts refits of whole weights, and lora.merge=false has none: set lora.merge=true"
        )
    sizes = {option: config.megatron[key] for option, key in _TRAINER.items() if config.megatron.get(key) is not None}
    return {
        **sizes,
        **_engine_sizes(config),
        "model": config.model.path,
        "gpus": config.cluster.trainer_ranks,
        "replicas": config.rollout.replicas,
        "bucket_bytes": config.refit.bucket_bytes,
        "colocated": take_turns(config),
        "staleness": config.schedule.max_staleness,
        "megatron": config.megatron,
        "training_dtype": config.model.dtype,
        "lora": _lora(config),
        "mtp_training": config.model.mtp_training,
        "keeps_reference": PolicyObjective(config.algorithm).needs_reference,
        "sends_whole_tensors": config.refit.path == "loader",
        "not_planned": _others(config),
        **_work(config, options.updates or config.algorithm.updates_per_step),
    }


def _others(config: "MegarlConfig") -> dict[str, int]:
    """The models in addition to the policy, by name, with their ranks."""
    from megarl.models.auxiliary import auxiliary_options

    return {name: options.parallel.world_size for name, options in auxiliary_options(config).items()}


def _lora(config: "MegarlConfig") -> "Lora | None":
    from megarl.config.lora import adapter_options

    adapter = adapter_options(config.lora, config.loop.seed)
    return adapter.lora if adapter else None


def _work(config: "MegarlConfig", updates: int) -> dict[str, Any]:
    """The work of a step of `updates` updates; the mean prompt is assumed to be half as long as the longest."""
    from megarl.algorithms import PolicyObjective
    from megarl.models.auxiliary import wants_teachers
    from megarl.stages.model_outputs import policy_passes

    objective = PolicyObjective(replace(config.algorithm, updates_per_step=updates))
    return {
        "prompts": config.loop.prompts_per_step,
        "samples": config.loop.samples_per_prompt,
        "prompt_tokens": config.data.max_prompt_tokens / 2,
        "max_response_tokens": config.rollout.max_response_tokens,
        "max_tokens_per_micro_batch": config.loop.max_tokens_per_micro_batch,
        "updates": updates,
        "log_prob_passes": policy_passes(objective, has_teachers=wants_teachers(config)),
    }


def _engine_sizes(config: "MegarlConfig") -> dict[str, Any]:
    from converters.number_formats import FP8_BLOCK, number_format

    kind = engine_kind(config.rollout.engine)
    sizes = kind.sizes(config.rollout.engine_args)
    # FP8 weights that the engine quantises itself are in blocks, too.
    held = FP8_BLOCK if sizes.dtype == "fp8" else None
    most = kind.max_concurrent_samples(config.rollout.engine_args) or inf
    return {
        "engine_tp": sizes.tensor,
        "engine_ep": sizes.expert,
        "engine_dtype": number_format(config.rollout.weights) or held,
        "memory_share": partial(kind.memory_share, config.rollout.engine_args),
        "computes_beside": kind.computes_beside,
        "prefill_tokens": kind.prefill_tokens(config.rollout.engine_args),
        "most_samples": most / max(1, (sizes.expert or 1) // sizes.tensor),
        "is_eager": sizes.is_eager,
        "kv_bytes": sizes.kv_bytes,
        "kv_ranks": sizes.kv_ranks,
    }
