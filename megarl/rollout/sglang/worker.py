"""Calls of SGLang's workers, which come through `calls`: its loader, its trace, and direct refits."""

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
        """See `ReceivingModel.after_direct_write`: the rest is what the server does when an update ends."""
        if hasattr(self._model, "post_load_weights"):
            self._model.post_load_weights()


_WRITING = (WeightReceiver.open, WeightReceiver.receive)
"""Methods by which weights come past the loader."""


class Worker(ProfiledWorker):
    """A worker of SGLang's, which has its ModelRunner `runner`, as one call leaves it to the next."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.number: int = runner.weight_updater.tp_rank
        self._model: Any = runner.model
        self._receiver = WeightReceiver(_Model(self._model), self.number)
        self._segments: list[Tensor] = []
        self._together = LoadedTogether(self._model.config)
        self._taken: dict[str, bool] = {}
        """Name of a tensor -> whether the loader puts it anywhere."""
        self.why_no_others: str | None = None
        """SGLang's reason to take no weights in place of those that it has: calls that write raise UpdateError."""

    def map_segments(self, segments: Sequence[str], segment_bytes: int) -> None:
        """Map the shared-memory segments that buckets will lie in."""
        self._segments = [map_segment(segment, segment_bytes) for segment in segments]

    def begin_loading(self) -> None:
        """Keep nothing of an update that was given up."""
        self._check_writable()
        self._together.forget()

    def load_bucket(self, bucket: Bucket) -> list[str]:
        """Load a bucket by the model's own loader. Gives the names of tensors of which it keeps nothing in this worker.

        SGLang 0.5.23 skips a tensor that it does not know without an error. See also `tracing.check_loadable`.
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
        """Raise UpdateError where the loader lacks a tensor that it loads together with another."""
        if waiting := self._together.waiting():
            raise UpdateError(f"SGLang's loader skips {waiting[0]}, which it takes with another tensor alone")

    def forget_adapter(self) -> None:
        """See `AdapterSlot.forget`."""
        self._slot.forget()

    def keep_bucket(self, bucket: Bucket) -> None:
        """Keep the matrices of an adapter that a bucket brings, for `fill_slot`."""
        self._slot.keep(loadable(bucket, self._segments[bucket.segment]))

    def fill_slot(self) -> None:
        """See `AdapterSlot.fill`."""
        self._slot.fill()

    def trace_layout(self, hf_shapes: Mapping[str, Shape], hf_dtypes: Mapping[str, torch.dtype]) -> PackedTrace:
        """Where the tensors of a HuggingFace checkpoint lie in this worker (`tracing.trace_model`)."""
        return PackedTrace.of(tracing.trace_model(self._model, hf_shapes, hf_dtypes))

    def call_receiver(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """The `outcome` of a method of this worker's WeightReceiver."""
        if method in _WRITING:
            self._check_writable()
        return outcome(method, self._receiver, *arguments)

    def count_memory(self, memory: CountedMemory) -> None:
        """Count what this worker holds, where there is no GPU to do it."""
        cpu.corrections.memory_of(self._runner).count_in(memory)

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back, where SGLang's own call frees nothing."""
        cpu.corrections.memory_of(self._runner).sleep()

    def wake_up(self, parts: Sequence[EngineMemory]) -> None:
        """Have these parts back."""
        cpu.corrections.memory_of(self._runner).wake_up(parts)

    def _check_writable(self) -> None:
        """Raise UpdateError where SGLang takes no new weights."""
        if self.why_no_others is not None:
            raise UpdateError(self.why_no_others)

    @functools.cached_property
    def _slot(self) -> AdapterSlot:
        """The slot for an adapter, of an engine that has one."""
        return AdapterSlot(self._runner.lora_manager)


def answer(runner: Any, why_no_others: str | None = None) -> None:
    """Carry out the call that lies in the server's folder, in the worker that has SGLang's ModelRunner `runner`.

    Where there is a reason `why_no_others` may take the place of its weights, calls that write raise UpdateError.
    """
    if not hasattr(runner, "megarl_worker"):
        runner.megarl_worker = Worker(runner)
    worker: Worker = runner.megarl_worker
    worker.why_no_others = why_no_others
    CallFolder.of_this_server().answer(worker.number, worker)
