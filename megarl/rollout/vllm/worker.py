"""megarl's extension of vLLM worker processes.

vLLM imports the module of its argument `worker_extension_cls` in every worker before it builds the model. This is the
only way to hook in that early, so here, and nowhere else, importing has side effects.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.platforms import current_platform

from converters.layout import Shape
from converters.layouts.traced_layout import PackedTrace
from megarl.resharding.direct.weight_receiver import WeightReceiver, outcome
from megarl.rollout.profiled_worker import ProfiledWorker
from megarl.rollout.vllm import (
    adapter_slot,
    cpu,
    dummy_scales,
    int8,
    kv_scales,
    made_parameters,
    processes,
    quantised_load,
    routers,
    tracing,
    weight_transfer,
)
from megarl.rollout.vllm.draft import WithDraft
from megarl.rollout.vllm.kind import BOUNDED_KV, LORA_ALPHA
from megatron_ext.memory.device_memory import CountedMemory

weight_transfer.register()
adapter_slot.register()
processes.listen_where_asked()
routers.keep_logits_in_float32()
quantised_load.quantise_what_is_read()
made_parameters.note_biases()
int8.leave_blackwell_to_triton()
dummy_scales.begin_with_scales_of_one()
if current_platform.is_cpu():
    cpu.corrections.install()
    cpu.fp8.install()
    cpu.number_formats.install()
    cpu.kv_cache.round_keys_and_values_to_nearest()


class VllmModel:
    """See `megarl.resharding.direct.weight_receiver.ReceivingModel`."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig, derive: Callable[[], None]) -> None:
        self._model = model
        self._config = config
        self._derive = derive

    def loaded_parameters(self) -> Mapping[str, Tensor]:
        """See `ReceivingModel.loaded_parameters`."""
        return tracing.loaded_parameters(self._model)

    def after_direct_write(self) -> None:
        """See `ReceivingModel.after_direct_write`."""
        tracing.after_direct_write(self._model, self._config)
        self._derive()


class WorkerExtension(ProfiledWorker):
    """Methods that vLLM adds to its worker class."""

    _receiver: WeightReceiver | None = None
    _recorder: cpu.routed_experts.Recorder

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Map the shared-memory segments of later buckets."""
        info = {"paths": segments, "segment_bytes": segment_bytes}
        self.init_weight_transfer_engine(info)  # type: ignore[attr-defined]

    def begin_weight_update(self) -> None:
        """Begin an update of all loaded weights."""
        config = self.model_config  # type: ignore[attr-defined]
        self.weight_transfer_engine.set_weight_update_target(self._loaded(), config)  # type: ignore[attr-defined]
        self.start_weight_update()  # type: ignore[attr-defined]

    def _loaded(self) -> torch.nn.Module:
        """The model, combined with its draft if there is one."""
        model, draft = self.get_model(), self.get_draft_model()  # type: ignore[attr-defined]
        if draft is None:
            return model
        return WithDraft(model, draft, self.model_config.hf_text_config.num_hidden_layers)  # type: ignore[attr-defined]

    def complete_weight_update(self) -> None:
        """Finish an update after all weights have come."""
        self.finish_weight_update()  # type: ignore[attr-defined]
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        if isinstance(transfer, adapter_slot.AdapterTransfer):
            alpha = self.vllm_config.additional_config[LORA_ALPHA]  # type: ignore[attr-defined]
            transfer.fill_slot(self.get_model(), alpha)  # type: ignore[attr-defined]
        self.bound_keys_and_values()

    def bound_keys_and_values(self) -> None:
        """Derive the KV cache scales from the weights, if asked for."""
        if self.vllm_config.additional_config.get(BOUNDED_KV):  # type: ignore[attr-defined]
            kv_scales.bound_keys_and_values(self._loaded())

    def abort_weight_update(self) -> None:
        """End an update that failed on another worker or before it was complete, so that a new one can begin."""
        if self._weight_update_active:  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]

    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> PackedTrace:
        """Trace where this worker keeps the tensors of a HuggingFace checkpoint (`tracing.trace_model`)."""
        trace = tracing.trace_model(self._loaded(), self.model_config, hf_shapes, hf_dtypes)  # type: ignore[attr-defined]
        return PackedTrace.of(trace)

    def part(self) -> int:
        """See `ProfiledWorker.part`."""
        return self.parallel_config.node_rank  # type: ignore[attr-defined]

    def call_pickled(self, call: bytes) -> bytes:
        """Call a method of this worker and return its pickled result; `call` is the pickled name and arguments."""
        method, arguments = pickle.loads(call)
        return pickle.dumps(getattr(self, method)(*arguments))

    def count_memory(self, memory: CountedMemory) -> None:
        """See `Sleeper.count_memory`."""
        cpu.corrections.memory_of(self).count_in(memory)

    def record_routed_experts(self) -> None:
        """Record the experts of tokens, if vLLM does not."""
        self._recorder = cpu.routed_experts.Recorder(self.model_runner)  # type: ignore[attr-defined]

    def take_routed_experts(self) -> dict[str, cpu.routed_experts.Rows]:
        """See `Recorder.take`."""
        return self._recorder.take()

    def call_receiver(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of this worker's WeightReceiver; return its `outcome`."""
        if self._receiver is None:
            config = self.model_config  # type: ignore[attr-defined]
            model = VllmModel(self._loaded(), config, self.bound_keys_and_values)
            self._receiver = WeightReceiver(model, self._number())
        return outcome(method, self._receiver, *arguments)

    def _number(self) -> int:
        """The index of this worker in the engine; the workers of a data-parallel rank are consecutive."""
        parallel = self.parallel_config  # type: ignore[attr-defined]
        return parallel.data_parallel_index * parallel.world_size + self.rank  # type: ignore[attr-defined]
