"""The workers of a vLLM engine on another machine than its first: they are called from there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.process.loading import load
from megarl.rollout.vllm.arguments import make_engine_config, prepare_environment


class VllmEnginePart:
    """See `megarl.rollout.protocol.EnginePart`; the arguments are those of `VllmEngine`."""

    def __init__(self, model_path: Path, engine_args: Mapping[str, Any]) -> None:
        self._model_path = model_path
        self._engine_args = engine_args
        self._executor: Any = None

    def start(self) -> None:
        """See `EnginePart.start`."""
        prepare_environment(self._engine_args)
        executor = load("vllm.v1.executor.multiproc_executor", "MultiprocExecutor")
        self._executor = executor(make_engine_config(self._model_path, self._engine_args))

    def close(self) -> None:
        """See `EnginePart.close`."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
