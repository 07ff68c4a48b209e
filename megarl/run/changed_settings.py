"""The settings that a resumed run has changed since its checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megarl.config.origins import defaults, leaves
from megarl.run.checkpoints import Checkpoint
from megarl.schema import MegarlConfig

CONFIG_STATE = "config"
"""Key of the configuration in the state of a checkpoint."""
_OF_EACH_START = ("output_dir", "checkpoint.resume")
_UNSET = "unset"


def changed_settings(checkpoint: Checkpoint, config: MegarlConfig) -> list[str]:
    """Every key whose value differs from that of the run that wrote the checkpoint, with both values.

    Example: ["loop.steps 100 -> 200", "megatron.lr 1e-06 -> 5e-07"]. Empty if the checkpoint has no configuration.
    """
    if CONFIG_STATE not in checkpoint.state:
        return []  # of an earlier version
    before, now = _values(checkpoint.state[CONFIG_STATE]), _values(asdict(config))
    return [
        f"{key} {before.get(key, _UNSET)} -> {now.get(key, _UNSET)}"
        for key in sorted(before.keys() | now.keys())
        if key not in _OF_EACH_START and before.get(key, _UNSET) != now.get(key, _UNSET)
    ]


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value as JSON has it; a key that a version has added had its default before."""
    values = {**defaults(), **dict(leaves(config))}
    return json.loads(json.dumps(values))
