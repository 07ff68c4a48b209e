"""vLLM as an engine: implements the engine's protocols on vLLM's core."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_args

import torch

from converters.layout import Shape
from converters.layouts.traced_layout import PackedTrace
from megarl.data import Turn
from megarl.process.loading import load
from megarl.resharding.loader.buckets import Bucket
from megarl.rollout.engine_of_workers import EngineOfWorkers
from megarl.rollout.owned_engine import by_owner
from megarl.rollout.protocol import EngineDiedError, EngineMemory, Load, Request
from megarl.rollout.request_in_flight import Answer, Listener, SampleInFlight
from megarl.rollout.returned_experts import ReturnedExperts
from megarl.rollout.stepping_engine import SteppingEngine
from megarl.rollout.vllm.arguments import make_engine_config, prepare_environment
from megarl.rollout.vllm.core import Core, InProcessCore
from megarl.rollout.vllm.cpu.routed_experts import ARGUMENT, RecordingCore
from megarl.rollout.vllm.data_parallel import DataParallelCore
from megarl.rollout.vllm.kind import ADAPTER_SLOT
from megarl.rollout.vllm.sequences import SequencesInFlight
from megatron_ext import device


class VllmEngine(SteppingEngine, EngineOfWorkers):
    """See `megarl.rollout.protocol.Engine`. `engine_args` are fields of vLLM's EngineArgs by their own names."""

    title = "vLLM"

    def __init__(self, model_path: Path | str, engine_args: Mapping[str, Any]) -> None:
        super().__init__(model_path, engine_args)
        self._core: Core | None = None
        self._sequences: SequencesInFlight
        self._held = False

    @by_owner
    def start(self) -> None:
        """See `Sampler.start`."""
        prepare_environment(self._engine_args)
        # Import this first, as it imports the rest of vLLM.
        load("vllm.v1.engine.llm_engine", "LLMEngine")
        returned = ReturnedExperts.of(self._model_path) if self._engine_args.get(ARGUMENT) else None
        config = make_engine_config(self._model_path, self._engine_args)
        if config.parallel_config.data_parallel_size > 1:
            self._core = DataParallelCore(config)
        else:
            is_recorded = returned is not None and device.backend() == "gloo"
            self._core = RecordingCore(config) if is_recorded else InProcessCore(config)
        has_slot = bool(self._engine_args.get(ADAPTER_SLOT))
        model = config.model_config
        self._sequences = SequencesInFlight(
            self._core, model.max_model_len, model.get_vocab_size(), returned, adapted=has_slot
        )
        # An empty slot counts as no weights, too.
        self._version = -1 if has_slot or config.load_config.load_format == "dummy" else 0
        if self._version == 0:
            self._workers("bound_keys_and_values")

    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> list[PackedTrace]:
        """See `LayoutSource.trace_layout`."""
        from megarl.rollout.vllm.tracing import check_version

        # Checked here as well, because an exception of a worker process arrives as another type.
        check_version()
        return super().trace_layout(hf_shapes, hf_dtypes)

    @by_owner
    def worker_parts(self) -> list[int]:
        """See `LayoutSource.worker_parts`."""
        return self._workers("part")

    @by_owner
    def sleep(self) -> None:
        """See `Sleeper.sleep`."""
        self._pause_stepping()
        self._abort()
        self._running().sleep()
        self._resume_stepping()
        self._away = frozenset(get_args(EngineMemory))

    @by_owner
    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """See `Sleeper.wake_up`."""
        if wanted := sorted(self._away.intersection(parts)):
            self._running().wake_up(wanted)
            self._away -= frozenset(wanted)

    # The methods below, too, run in the owner thread.

    def _running(self) -> Core:
        if self._core is None:
            raise RuntimeError("the vLLM engine was not started")
        return self._core

    def _add_samples(self, requests: Sequence[Request], listener: Listener | None) -> list[Answer]:
        return self._sequences.add(requests, self._version, listener)

    def _can_step(self) -> bool:
        return bool(self._sequences) and not self._held

    def _compute(self) -> None:
        self._sequences.collect(self._running().step(), self._version)

    def _load_after_step(self) -> Load | None:
        return self._running().load()

    def _pause_stepping(self) -> None:
        if not self._held:
            try:
                self._sequences.collect(self._running().hold(), self._version)
            except Exception as error:
                # The error ends a step in flight, so the engine dies of it, as of any error of a step.
                raise EngineDiedError(str(error)) from error
            self._held = True

    def _resume_stepping(self) -> None:
        if self._held and not self._paused and self._update is None:
            self._running().release()
            self._held = False
            self._queue_step()

    def _samples(self) -> Iterable[SampleInFlight]:
        return self._sequences.all()

    def _abort(self) -> None:
        self._sequences.abort()

    def _abort_some(self, answers: Collection[Future[list[Turn]]]) -> None:
        self._sequences.abort(answers)

    def _fail(self, error: EngineDiedError) -> None:
        self._sequences.fail(error)

    def _reset_kv_cache(self) -> None:
        # Sequences in flight are recomputed from their first token, since their KV cache is of older weights.
        if not self._running().forget():
            raise RuntimeError("vLLM could not reset its prefix cache")

    def _keep_kv_cache(self, version: int) -> None:
        self._sequences.begin_anew(version)

    def _abandon_update(self) -> None:
        self._workers("abort_weight_update")

    def _begin_loading(self) -> None:
        self._workers("begin_weight_update")

    def _load_weights(self, bucket: Bucket) -> None:
        self._workers("update_weights", {"bucket": bucket})

    def _finish_loading(self) -> None:
        self._workers("complete_weight_update")

    def _workers(self, method: str, *arguments: Any) -> list[Any]:
        return self._running().call_workers(method, *arguments)

    def _close(self) -> None:
        if self._core is not None:
            self._sequences.fail(self._closed())
            self._core.close()
            self._core = None
