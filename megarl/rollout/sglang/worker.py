"""Functions that run in SGLang's workers, called through `calls`: its loader, its trace, and direct refits."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from converters.layout import Shape
from converters.layouts.traced_layout import PackedTrace
from megarl.process.profiler import Profiler, TimelineEvent
from megarl.resharding.direct.weight_receiver import WeightReceiver, outcome
from megarl.resharding.loader.buckets import Bucket, loadable
from megarl.resharding.shared_memory import map_segment
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
        """See `ReceivingModel.after_direct_write`: the rest is what the server does when an update ends."""
        if hasattr(self._model, "post_load_weights"):
            self._model.post_load_weights()


class _Worker:
    """A worker, as one call leaves it to the next."""

    def __init__(self, runner: Any, number: int) -> None:
        self.runner = runner
        self.model: Any = runner.model
        self.receiver = WeightReceiver(_Model(self.model), number)
        self.segments: list[Tensor] = []
        self.together = LoadedTogether(self.model.config)
        self.taken: dict[str, bool] = {}
        """Name of a tensor -> whether the loader puts it anywhere."""
        self.profiler: Profiler | None = None
        self.why_no_others: str | None = None
        """SGLang's reason to take no weights in place of those that it has."""

    def check_writable(self) -> None:
        """Raise UpdateError where SGLang takes no new weights."""
        if self.why_no_others is not None:
            raise UpdateError(self.why_no_others)

    @functools.cached_property
    def slot(self) -> AdapterSlot:
        """The slot for an adapter, of an engine that has one."""
        return AdapterSlot(self.runner.lora_manager)


_WRITING = (WeightReceiver.open, WeightReceiver.receive)
"""Methods by which weights come past the loader."""


def answer(runner: Any, why_no_others: str | None = None) -> None:
    """Carry out the call that lies in the server's folder, in the worker that has SGLang's ModelRunner `runner`.

    Where there is a reason `why_no_others` may take the place of its weights, calls that write raise UpdateError.
    """
    number: int = runner.weight_updater.tp_rank
    if not hasattr(runner, "megarl_worker"):
        runner.megarl_worker = _Worker(runner, number)
    runner.megarl_worker.why_no_others = why_no_others
    CallFolder.of_this_server().answer(number, runner.megarl_worker)


def map_segments(worker: _Worker, segments: Sequence[str], segment_bytes: int) -> None:
    """Map the shared-memory segments that buckets will lie in."""
    worker.segments = [map_segment(segment, segment_bytes) for segment in segments]


def begin_loading(worker: _Worker) -> None:
    """Keep nothing of an update that was given up."""
    worker.check_writable()
    worker.together.forget()


def load_bucket(worker: _Worker, bucket: Bucket) -> list[str]:
    """Load a bucket by the model's own loader. Gives the names of tensors of which it keeps nothing in this worker.

    SGLang 0.5.23 skips a tensor that it does not know without an error. See also `tracing.check_loadable`.
    """
    worker.check_writable()
    tracing.check_loadable(worker.model)
    tensors = worker.together.ready(dict(loadable(bucket, worker.segments[bucket.segment])))
    new = {name: tensor for name, tensor in tensors.items() if name not in worker.taken}
    if new:
        shapes = {name: tuple(tensor.shape) for name, tensor in new.items()}
        trace = tracing.trace_model(worker.model, shapes, {name: tensor.dtype for name, tensor in new.items()})
        known = {placement.hf_name for placement in trace.shard.placements} | trace.untraced.keys()
        worker.taken |= {name: name in known for name in new}
    with torch.no_grad():
        worker.model.load_weights(list(tensors.items()))
    return [name for name in tensors if not worker.taken[name]]


def finish_loading(worker: _Worker) -> None:
    """Raise UpdateError where the loader lacks a tensor that it loads together with another."""
    if waiting := worker.together.waiting():
        raise UpdateError(f"SGLang's loader skips {waiting[0]}, which it takes with another tensor alone")


def forget_adapter(worker: _Worker) -> None:
    """See `AdapterSlot.forget`."""
    worker.slot.forget()


def keep_bucket(worker: _Worker, bucket: Bucket) -> None:
    """Keep the matrices of an adapter that a bucket brings, for `fill_slot`."""
    worker.slot.keep(loadable(bucket, worker.segments[bucket.segment]))


def fill_slot(worker: _Worker) -> None:
    """See `AdapterSlot.fill`."""
    worker.slot.fill()


def trace_layout(worker: _Worker, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> PackedTrace:
    """Where the tensors of a HuggingFace checkpoint lie in this worker (`tracing.trace_model`)."""
    return PackedTrace.of(tracing.trace_model(worker.model, hf_shapes, hf_dtypes))


def call_receiver(worker: _Worker, method: Callable[..., Any], *arguments: Any) -> Any:
    """The `outcome` of a method of this worker's WeightReceiver."""
    if method in _WRITING:
        worker.check_writable()
    return outcome(method, worker.receiver, *arguments)


def count_memory(worker: _Worker, memory: CountedMemory) -> None:
    """Count what this worker holds, where there is no GPU to do it."""
    cpu.memory_of(worker.runner).count_in(memory)


def start_profiler(worker: _Worker) -> None:
    """Begin to record what the process of this worker does."""
    worker.profiler = Profiler()
    worker.profiler.start()


def stop_profiler(worker: _Worker) -> list[TimelineEvent] | None:
    """End that: the events; None where it was not begun."""
    profiler, worker.profiler = worker.profiler, None
    return None if profiler is None else profiler.stop()


def sleep(worker: _Worker) -> None:
    """Give the memory of weights and KV cache back, where SGLang's own call frees nothing."""
    cpu.memory_of(worker.runner).sleep()


def wake_up(worker: _Worker, parts: Sequence[EngineMemory]) -> None:
    """Have these parts back."""
    cpu.memory_of(worker.runner).wake_up(parts)
