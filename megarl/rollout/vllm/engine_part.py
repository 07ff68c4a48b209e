"""The workers of a vLLM engine on a machine other than its first, from which they are called."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.process.loading import load
from megarl.rollout.vllm.arguments import make_engine_config, prepare_environment

_WITHOUT_WORKERS = 1
"""Exit code of a part whose worker has died."""


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
        # vLLM would only stop the other workers here; exiting makes the loss of the engine known.
        self._executor.register_failure_callback(lambda: os._exit(_WITHOUT_WORKERS))

    def close(self) -> None:
        """See `EnginePart.close`."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
