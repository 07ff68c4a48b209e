"""Sampling: one protocol, engines behind it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.fp8 import is_block_fp8
from converters.number_formats import number_format
from megarl.rollout.kind import Arguments, EngineKind
from megarl.rollout.transformers.kind import TRANSFORMERS
from megarl.rollout.vllm.kind import VLLM
from megarl.schema import MegarlConfig, RolloutConfig

ENGINES: Mapping[str, EngineKind] = {"vllm": VLLM, "transformers": TRANSFORMERS}
"""Kinds of engines, by the name that `rollout.engine` has for them."""


def engine_kind(name: str) -> EngineKind:
    """The kind of engine of this name. Raises UserError where there is none."""
    if name not in ENGINES:
        raise UserError(f"rollout.engine={name} is not an engine: use one of {', '.join(sorted(ENGINES))}")
    return ENGINES[name]


def in_number_format(rollout: RolloutConfig, hf_config: Mapping[str, Any]) -> Arguments:
    """The engine's arguments, with which it holds the weights of a model in the form that `rollout.weights` names.

    `hf_config` is the model's config.json. Raises UserError for a format that there is not or that no engine of this
    kind knows, for arguments that contradict it, for a model that is in FP8 already, and for one whose sizes don't fit.
    """
    kind, chosen = engine_kind(rollout.engine), number_format(rollout.weights)
    if chosen is None:
        return rollout.engine_args
    if kind.quantised is None:
        raise UserError(
            f"rollout.weights={chosen.name} is not for rollout.engine={rollout.engine}, which holds weights as they are"
            f" trained: leave one of the two out"
        )
    if is_block_fp8(hf_config):
        raise UserError(
            f"rollout.weights={chosen.name} is made of weights as they are trained, and model.path is in FP8 already:"
            " leave rollout.weights out"
        )
    return kind.quantised(rollout.engine_args, chosen, read_architecture(hf_config))


def engine_configuration(config: MegarlConfig) -> RolloutConfig:
    """The group `rollout`, with the arguments that the rest of the configuration asks for.

    They make the engine compute as the trainer does, and sleep if it takes turns with the trainer.
    """
    kind, rollout = engine_kind(config.rollout.engine), config.rollout
    if config.model.fp32_logits:
        rollout = kind.with_float32_logits(rollout)
    if config.cluster.sharing():
        rollout = replace(rollout, engine_args={**rollout.engine_args, **kind.able_to_sleep})
    return rollout
