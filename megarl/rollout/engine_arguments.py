"""Options of an inference engine by the engine's own names, read from the installed engine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from converters.errors import UserError
from megarl.rollout.vllm import supported_arguments
from megarl.schema import MegarlConfig, RolloutConfig
from megatron_ext.arguments import nearest_name
from megatron_ext.dataclass_fields import FieldType, read_fields
from megatron_ext.supported_options import refuse

CLASSES: Mapping[str, tuple[str, str]] = {"vllm": ("vllm.engine.arg_utils", "EngineArgs")}
"""Module and name of the dataclass from which an engine is made."""
REFUSED = {"vllm": supported_arguments.REFUSED}
FP32_LOGITS = {"vllm": {"hf_overrides": {"head_dtype": "float32"}}}
"""Arguments with which an engine does not round logits; of each group of values, what is given wins."""


def engine_arguments(engine: str) -> Mapping[str, FieldType]:
    """Name -> type of an engine's options; empty for one that is not installed here."""
    if engine not in CLASSES:
        return {}
    try:
        return read_fields(*CLASSES[engine])
    except ModuleNotFoundError:
        return {}


def check_engine_arguments(engine: str, arguments: Mapping[str, Any]) -> None:
    """Raise UserError for an option that the installed engine does not have, with the nearest it has, or a refused one.

    Where the engine is not installed (the machine that submits a job), it is checked where it starts.
    """
    known = engine_arguments(engine)
    for name in arguments if known else ():
        if name not in known:
            nearest = nearest_name(name, known)
            advice = f"; did you mean rollout.engine_args.{nearest}?" if nearest else ""
            raise UserError(f"rollout.engine_args.{name}: the installed {engine} has no such option{advice}")
    refuse(arguments, REFUSED.get(engine, {}), "rollout.engine_args.")


def engine_configuration(config: MegarlConfig) -> RolloutConfig:
    """The group `rollout`, with the arguments that make the engine compute as the trainer does."""
    rollout = config.rollout
    if not config.model.fp32_logits:
        return rollout
    given = dict(rollout.engine_args)
    for name, values in FP32_LOGITS.get(rollout.engine, {}).items():
        given[name] = {**values, **(given.get(name) or {})}
    return replace(rollout, engine_args=given)
