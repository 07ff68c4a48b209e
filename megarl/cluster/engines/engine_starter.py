"""Starts engines at the beginning of a run, and to replace dead ones."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from converters.architectures import Lora, read_architecture
from converters.formats.safetensors import CONFIG, read_json
from converters.number_formats import number_format
from megarl.cluster.engines.engine_handle import EngineHandle
from megarl.cluster.workers.calls import wait
from megarl.cluster.workers.worker import Call
from megarl.cluster.workers.worker_group import WorkerGroup
from megarl.rollout.adapter_slot import with_adapter_slot
from megarl.rollout.kind import Arguments, EngineKind
from megarl.rollout.kv_scales import with_kv_scales
from megarl.rollout.number_format import in_number_format
from megarl.rollout.protocol import Engine
from megarl.schema import RolloutConfig
from megatron_ext.memory.device_memory import CountedMemory


class EngineStarter:
    """Creates engines of a `kind` in `processes`, all with the same model and arguments."""

    def __init__(self, config: RolloutConfig, kind: EngineKind, processes: WorkerGroup) -> None:
        self._config, self._kind, self._processes = config, kind, processes
        self._model_path: Path
        self._arguments: Arguments
        self._reads_again = False
        """Whether restarted engines read the base weights, because refits only bring an adapter."""
        self.memory: CountedMemory | None = None
        """Counts the memory of new engines if there is no GPU."""

    def set_arguments(self, model_path: Path, *, load_weights: bool, adapter: Lora | None) -> None:
        """Choose how engines start. Raises as `EngineGroup.begin_start`."""
        arguments: Arguments = self._config.engine_args
        self._reads_again = adapter is not None
        if adapter is not None:
            arguments = with_adapter_slot(self._config, read_architecture(read_json(model_path / CONFIG)), adapter)
        elif number_format(self._config.weights) is not None:
            arguments = in_number_format(self._config, read_json(model_path / CONFIG))
        arguments = with_kv_scales(self._config, arguments)
        self._model_path = model_path
        self._arguments = arguments if load_weights else {**arguments, **self._kind.without_weights}

    def leave_weights_to_refits(self) -> None:
        """Let engines started from now on get everything that refits bring from refits, not from the folder."""
        if not self._reads_again:
            self._arguments = {**self._arguments, **self._kind.without_weights}

    def make(self, handle: EngineHandle) -> Iterator[Sequence[Call[Any]]]:
        """See `EngineHandle.make`."""
        return handle.make(self._kind, self._model_path, self._arguments)

    def prepare(self, handle: EngineHandle) -> Iterator[Sequence[Call[Any]]]:
        """See `restarts.Start`."""
        handle.renew([self._processes.renew(process) for process in handle.processes])
        # Nothing may start while remains of the old engine still hold memory, ports or GPUs.
        yield [process.begin_end_others() for process in handle.processes]
        yield from self.make(handle)

    def load(self, handle: EngineHandle) -> Iterator[Sequence[Call[Any]]]:
        """See `restarts.Start`."""
        yield handle.begin_start()
        if self.memory is not None:
            yield [handle.begin(Engine.count_memory, self.memory)]
        version, parts = handle.begin(Engine.version), handle.begin(Engine.worker_parts)
        yield [version, parts]
        handle.note_started(wait([version])[0], wait([parts])[0])
