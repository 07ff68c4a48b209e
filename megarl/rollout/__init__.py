"""Sampling: one protocol, engines behind it."""

from collections.abc import Mapping
from dataclasses import replace

from converters.errors import UserError
from megarl.rollout.kind import EngineKind
from megarl.rollout.sglang.kind import SGLANG
from megarl.rollout.transformers.kind import TRANSFORMERS
from megarl.rollout.vllm.kind import VLLM
from megarl.schema import MegarlConfig, RolloutConfig

ENGINES: Mapping[str, EngineKind] = {"vllm": VLLM, "sglang": SGLANG, "transformers": TRANSFORMERS}
"""Kinds of engines, by the name that `rollout.engine` has for them."""


def engine_kind(name: str) -> EngineKind:
    """The kind of engine of this name. Raises UserError where there is none."""
    if name not in ENGINES:
        raise UserError(f"rollout.engine={name} is not an engine: use one of {', '.join(sorted(ENGINES))}")
    return ENGINES[name]


def engine_configuration(config: MegarlConfig) -> RolloutConfig:
    """The group `rollout`, with the arguments that the rest of the configuration asks for.

    They make the engine compute as the trainer does, sleep if it takes turns with the trainer, and return the experts
    of its tokens if the trainer is to send them there.
    """
    kind, rollout = engine_kind(config.rollout.engine), config.rollout
    if config.model.fp32_logits:
        rollout = kind.with_float32_logits(rollout)
    if config.cluster.sharing():
        rollout = replace(rollout, engine_args={**rollout.engine_args, **kind.able_to_sleep})
    if config.algorithm.router_replay == "rollout" and kind.returning_experts is not None:
        rollout = replace(rollout, engine_args={**rollout.engine_args, **kind.returning_experts})
    return rollout
