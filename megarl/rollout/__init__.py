"""Sampling: one protocol, engines behind it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from converters.errors import UserError
from megarl.rollout.protocol import Engine


def _vllm(model_path: Path, engine_args: Mapping[str, Any]) -> Engine:
    from megarl.rollout.vllm.engine import VllmEngine

    return VllmEngine(model_path, engine_args)


ENGINES: Mapping[str, Callable[[Path, Mapping[str, Any]], Engine]] = {"vllm": _vllm}
"""Makers of engines by name: (folder of the model, engine arguments by the engine's own names) -> engine."""


def make_engine(name: str, model_path: Path, engine_args: Mapping[str, Any]) -> Engine:
    """An engine that is not yet started. Raises UserError for an unknown name."""
    if name not in ENGINES:
        raise UserError(f"rollout.engine={name} is not an engine: use one of {', '.join(sorted(ENGINES))}")
    return ENGINES[name](model_path, engine_args)
