"""The settings that a resumed run has changed since its checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from converters.architectures import Architecture
from megarl.config.origins import defaults, leaves
from megarl.run.checkpoints import Checkpoint
from megarl.schema import MegarlConfig

CONFIG_STATE = "config"
"""Key of the configuration in the state of a checkpoint."""
MODEL_STATE = "model"
"""Key of `model_settings` in the state of a checkpoint."""
_OF_EACH_START = ("output_dir", "checkpoint.resume")
_UNSET = "unset"


def model_settings(architecture: Architecture) -> dict[str, Any]:
    """The model's settings as megatron-core takes them from config.json, without functions."""
    settings = {**architecture.transformer_config, **architecture.gpt_model, **asdict(architecture.extensions)}
    return {name: value for name, value in settings.items() if not callable(value)}


def changed_settings(checkpoint: Checkpoint, config: MegarlConfig, architecture: Architecture) -> list[str]:
    """Every setting whose value differs from that of the run that wrote the checkpoint, with both values.

    Example: ["loop.steps 100 -> 200", "config.json's rotary_base 10000.0 -> 500000.0"]. Settings that the checkpoint
    does not say, as one of an earlier version, are left out.
    """
    changed = []
    if CONFIG_STATE in checkpoint.state:
        before, now = _values(checkpoint.state[CONFIG_STATE]), _values(asdict(config))
        changed += _differences(before, now)
    if MODEL_STATE in checkpoint.state:
        now = _as_in_json(model_settings(architecture))
        changed += [f"config.json's {each}" for each in _differences(_as_in_json(checkpoint.state[MODEL_STATE]), now)]
    return changed


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {before.get(key, _UNSET)} -> {now.get(key, _UNSET)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, _UNSET) != now.get(key, _UNSET)
    ]


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value; a key that a version has added had its default before."""
    values = {**defaults(), **dict(leaves(config))}
    return _as_in_json({key: value for key, value in values.items() if key not in _OF_EACH_START})


def _as_in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values))
