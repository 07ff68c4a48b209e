"""The arguments of an engine that holds the weights in another form than they are trained in."""

from collections.abc import Mapping
from typing import Any

from converters.architectures import read_architecture
from converters.errors import UserError
from converters.fp8 import is_block_fp8
from converters.number_formats import number_format
from megarl.rollout import engine_kind
from megarl.rollout.kind import Arguments
from megarl.schema import RolloutConfig


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
    if chosen.name not in kind.number_formats:
        raise UserError(
            f"rollout.weights={chosen.name} is not for rollout.engine={rollout.engine}, which holds"
            f" {', '.join(kind.number_formats)}: take one of these, or another engine"
        )
    if is_block_fp8(hf_config):
        raise UserError(
            f"rollout.weights={chosen.name} is made of weights as they are trained, and model.path is in FP8 already:"
            " leave rollout.weights out"
        )
    return kind.quantised(rollout.engine_args, chosen, read_architecture(hf_config))
