"""Sampling: one protocol, engines behind it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import UserError

if TYPE_CHECKING:  # a configuration is checked without torch, by the tables of this package
    from megarl.rollout.protocol import Engine


def _vllm(model_path: Path, engine_args: Mapping[str, Any], load_weights: bool) -> "Engine":
    from megarl.rollout.vllm.engine import VllmEngine

    return VllmEngine(model_path, engine_args if load_weights else {**engine_args, "load_format": "dummy"})


ENGINES: "Mapping[str, Callable[[Path, Mapping[str, Any], bool], Engine]]" = {"vllm": _vllm}
"""Makers of engines by name: (folder of the model, engine arguments by the engine's own names, load_weights)."""


def make_engine(name: str, model_path: Path, engine_args: Mapping[str, Any], load_weights: bool = True) -> "Engine":
    """An engine that is not yet started; without `load_weights` it has none until its first update.

    Raises UserError for an unknown name.
    """
    if name not in ENGINES:
        raise UserError(f"rollout.engine={name} is not an engine: use one of {', '.join(sorted(ENGINES))}")
    return ENGINES[name](model_path, engine_args, load_weights)
