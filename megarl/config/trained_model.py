"""The config.json of the model that a trainer would hold, for commands that look ahead at a run."""

from typing import Any

from converters.architectures import MTP_LAYERS, read_architecture
from converters.errors import UserError
from converters.formats.safetensors import read_json, unquantised
from megarl.config.folder import model_config_file

_OPTION = "--prediction-layers"


def read_trained_config(place: str, option: str, prediction_layers: int | None) -> dict[str, Any]:
    """Read the config.json that `option` names, with this number of multi-token-prediction layers; None keeps its own.

    It is in bf16 even if the released weights are in a number format. Raises UserError if there is none, and for a
    number of layers that the architecture cannot have.
    """
    if prediction_layers is not None and prediction_layers < 0:
        raise UserError(f"{_OPTION} {prediction_layers} is too small; give at least 0")
    config = unquantised(read_json(model_config_file(place, option)))
    if prediction_layers is None:
        return config
    config[MTP_LAYERS] = prediction_layers
    if (held := read_architecture(config)).mtp_layers != prediction_layers:
        raise UserError(
            f"{_OPTION} {prediction_layers} is for another model: a {held.model_type} model has"
            f" {held.mtp_layers} layers of multi-token prediction here; leave it out"
        )
    return config
