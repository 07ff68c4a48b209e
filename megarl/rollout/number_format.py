"""Arguments of an engine that holds the weights in another number format than the trainer."""

from collections.abc import Mapping
from typing import Any

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.fp8 import is_block_fp8
from converters.number_formats import NumberFormat, number_format
from megarl.rollout import engine_kind
from megarl.rollout.kind import Arguments
from megarl.schema import RolloutConfig


def in_number_format(rollout: RolloutConfig, hf_config: Mapping[str, Any]) -> Arguments:
    """The engine's arguments, extended so that it holds the weights in the format that `rollout.weights` names.

    `hf_config` is the model's config.json. Raises UserError for an unknown format, one that this kind of engine does
    not support, arguments that contradict it, a model that is already in FP8, and one whose sizes do not fit.
    """
    kind, chosen = engine_kind(rollout.engine), held_format(rollout)
    if chosen is None:
        return rollout.engine_args
    assert kind.quantised is not None, "held_format refuses an engine without it"
    if is_block_fp8(hf_config):
        raise UserError(
            f"rollout.weights={chosen.name} is made of weights as they are trained, and model.path is in FP8 already:"
            " leave rollout.weights out"
        )
    return kind.quantised(rollout.engine_args, chosen, read_architecture(hf_config))


def held_format(rollout: RolloutConfig) -> NumberFormat | None:
    """The number format that `rollout.weights` names, None for weights as they are trained.

    Raises UserError for an unknown format, and one that this kind of engine does not support.
    """
    kind, chosen = engine_kind(rollout.engine), number_format(rollout.weights)
    if chosen is None:
        return None
    if kind.quantised is None:
        raise UserError(
            f"rollout.weights={chosen.name} is not for rollout.engine={rollout.engine}, which holds weights as they are"
            f" trained: leave one of the two out"
        )
    if chosen.name not in kind.number_formats:
        raise UserError(
            f"rollout.weights={chosen.name} is not for rollout.engine={rollout.engine}, which holds"
            f" {', '.join(kind.number_formats)}: take one of these, or another engine"
        )
    return chosen
