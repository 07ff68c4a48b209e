"""Arguments of an engine that keeps its base weights and is sent only the trained adapter."""

from converters.architectures import Architecture, Lora, adapter_architecture
from converters.architectures.lora import target_names
from converters.errors import UserError
from converters.number_formats import AS_TRAINED
from megarl.rollout import ENGINES, engine_kind
from megarl.rollout.kind import Arguments
from megarl.rollout.kv_scales import UNIT
from megarl.schema import RolloutConfig


def with_adapter_slot(rollout: RolloutConfig, architecture: Architecture, lora: Lora) -> Arguments:
    """Return the engine's arguments, with a slot for the adapter `lora`.

    Raises UserError for engines without such a slot, and for a model, an adapter or arguments that it does not support.
    """
    kind = engine_kind(rollout.engine)
    if kind.adapter_slot is None:
        able = ", ".join(name for name, each in ENGINES.items() if each.adapter_slot is not None)
        raise UserError(
            f"lora.merge=false is not for rollout.engine={rollout.engine}, into which no refit puts an adapter alone:"
            f" leave it out, or take one of {able}"
        )
    if rollout.weights != AS_TRAINED:
        raise UserError(
            f"lora.merge=false puts an adapter beside weights as they are trained, and rollout.weights="
            f"{rollout.weights} holds others: leave one of the two out"
        )
    if rollout.kv_scales != UNIT:
        raise UserError(
            f"lora.merge=false puts an adapter beside the weights, and rollout.kv_scales={rollout.kv_scales} follows"
            " from the weights alone: leave one of the two out"
        )
    adapter = adapter_architecture(architecture, lora)
    return kind.adapter_slot(rollout.engine_args, adapter, lora, target_names(adapter))
