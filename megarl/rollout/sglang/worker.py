"""The methods that megarl calls in SGLang's workers, through `calls`: loading, tracing, and direct refits."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from converters.layout import Shape
from converters.layouts.traced_layout import PackedTrace
from megarl.resharding.direct.weight_receiver import WeightReceiver, outcome
from megarl.resharding.loader.buckets import Bucket, loadable
from megarl.resharding.shared_memory import map_segment
from megarl.rollout.profiled_worker import ProfiledWorker
from megarl.rollout.protocol import EngineMemory, UpdateError
from megarl.rollout.sglang import cpu, tracing
from megarl.rollout.sglang.adapter_slot import AdapterSlot
from megarl.rollout.sglang.calls import CallFolder
from megarl.rollout.sglang.loaded_together import LoadedTogether
from megatron_ext.memory.device_memory import CountedMemory


class _Model:
    """See `megarl.resharding.direct.weight_receiver.ReceivingModel`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def loaded_parameters(self) -> Mapping[str, Tensor]:
        """See `ReceivingModel.loaded_parameters`."""
        return tracing.loaded_parameters(self._model)

    def after_direct_write(self) -> None:
        """See `ReceivingModel.after_direct_write`: the server does the rest when an update ends."""
        if hasattr(self._model, "post_load_weights"):
            self._model.post_load_weights()


_WRITING = (WeightReceiver.open, WeightReceiver.receive)
"""Methods that write weights without the loader."""


class Worker(ProfiledWorker):
    """A worker, with SGLang's ModelRunner `runner`; it keeps state between calls."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.number: int = runner.weight_updater.tp_rank
        self._model: Any = runner.model
        self._receiver = WeightReceiver(_Model(self._model), self.number)
        self._segments: list[Tensor] = []
        self._together = LoadedTogether(self._model.config)
        self._taken: dict[str, bool] = {}
        """Tensor name -> whether the loader stores it anywhere."""
        self.why_no_others: str | None = None
        """SGLang's reason for refusing new weights, if it has one; calls that write then raise UpdateError."""

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Map the shared-memory segments of later buckets."""
        self._segments = [map_segment(segment, segment_bytes) for segment in segments]

    def begin_loading(self) -> None:
        """Discard the remains of an abandoned update."""
        self._check_writable()
        self._together.forget()

    def load_bucket(self, bucket: Bucket) -> list[str]:
        """Load a bucket by the model's own loader. Returns the names of tensors that this worker skipped.

        SGLang 0.5.23 silently skips unknown tensors. See also `tracing.check_loadable`.
        """
        self._check_writable()
        tracing.check_loadable(self._model)
        tensors = self._together.ready(dict(loadable(bucket, self._segments[bucket.segment])))
        new = {name: tensor for name, tensor in tensors.items() if name not in self._taken}
        if new:
            shapes = {name: tuple(tensor.shape) for name, tensor in new.items()}
            trace = tracing.trace_model(self._model, shapes, {name: tensor.dtype for name, tensor in new.items()})
            known = {placement.hf_name for placement in trace.shard.placements} | trace.untraced.keys()
            self._taken |= {name: name in known for name in new}
        with torch.no_grad():
            self._model.load_weights(list(tensors.items()))
        return [name for name in tensors if not self._taken[name]]

    def finish_loading(self) -> None:
        """Raise UpdateError if a tensor that must be loaded together with another is missing."""
        if waiting := self._together.waiting():
            raise UpdateError(f"SGLang's loader skips {waiting[0]}, which it takes with another tensor alone")

    def forget_adapter(self) -> None:
        """See `AdapterSlot.forget`."""
        self._slot.forget()

    def keep_bucket(self, bucket: Bucket) -> None:
        """Keep a bucket's matrices of an adapter for `fill_slot`."""
        self._slot.keep(loadable(bucket, self._segments[bucket.segment]))

    def fill_slot(self) -> None:
        """See `AdapterSlot.fill`."""
        self._slot.fill()

    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> PackedTrace:
        """Trace where this worker keeps the tensors of a HuggingFace checkpoint (`tracing.trace_model`)."""
        return PackedTrace.of(tracing.trace_model(self._model, hf_shapes, hf_dtypes))

    def call_receiver(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of this worker's WeightReceiver; return its `outcome`."""
        if method in _WRITING:
            self._check_writable()
        return outcome(method, self._receiver, *arguments)

    def count_memory(self, memory: CountedMemory) -> None:
        """See `Sleeper.count_memory`."""
        cpu.corrections.memory_of(self._runner).count_in(memory)

    def sleep(self) -> None:
        """Free the memory of weights and KV cache, on devices where SGLang's own call frees nothing."""
        cpu.corrections.memory_of(self._runner).sleep()

    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """Restore these parts."""
        cpu.corrections.memory_of(self._runner).wake_up(parts)

    def _check_writable(self) -> None:
        """Raise UpdateError if SGLang refuses new weights."""
        if self.why_no_others is not None:
            raise UpdateError(self.why_no_others)

    @functools.cached_property
    def _slot(self) -> AdapterSlot:
        """The adapter slot of an engine that has one."""
        return AdapterSlot(self._runner.lora_manager)


def answer(runner: Any, why_no_others: str | None = None) -> None:
    """Execute the call in the server's folder, in the worker with SGLang's ModelRunner `runner`.

    If there is a reason `why_no_others`, calls that write weights raise UpdateError.
    """
    if not hasattr(runner, "megarl_worker"):
        runner.megarl_worker = Worker(runner)
    worker: Worker = runner.megarl_worker
    worker.why_no_others = why_no_others
    CallFolder.of_this_server().answer(worker.number, worker)
