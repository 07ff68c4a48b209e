"""Arguments of an engine whose FP8 KV cache has scales derived from the weights."""

from converters.errors import UserError
from megarl.rollout import ENGINES, engine_kind
from megarl.rollout.kind import Arguments
from megarl.schema import RolloutConfig

UNIT = "unit"
BOUND = "bound"
KV_SCALES = (UNIT, BOUND)
"""Values of `rollout.kv_scales`."""


def with_kv_scales(rollout: RolloutConfig, arguments: Arguments) -> Arguments:
    """The engine's `arguments`, extended so that its KV cache has the scales that `rollout.kv_scales` names.

    Raises UserError for engines that do not support these scales, and for arguments with which there are none.
    """
    if rollout.kv_scales == UNIT:
        return arguments
    kind = engine_kind(rollout.engine)
    if kind.bounded_kv is None:
        able = ", ".join(name for name, each in ENGINES.items() if each.bounded_kv is not None)
        raise UserError(
            f"rollout.kv_scales={rollout.kv_scales} is not for rollout.engine={rollout.engine}, whose keys and values"
            f" have no scales: leave it out, or take one of {able}"
        )
    return kind.bounded_kv(arguments)
