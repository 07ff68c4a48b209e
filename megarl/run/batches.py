"""Batches of the optimizer steps of a run that trains on given data; a checkpoint keeps its position among them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors.torch import load_file, save
from torch import Tensor

from megarl.data import PromptSampler
from megarl.run.checkpoint_files import WriteFile
from megatron_ext.packing.packing import RaggedBatch

_FILE = "batches.safetensors"
_FIELD = "field."


class StepBatch(NamedTuple):
    """The batch of one optimizer step, and metrics of its making."""

    batch: RaggedBatch
    metrics: Mapping[str, float] = MappingProxyType({})


class BatchStream:
    """Yields one batch per step. A checkpoint keeps the sampler's position and the batches not trained on yet.

    `make(sampler, step)` draws the batch for the step after `step`, or batches for several steps; none if there is
    nothing left to learn.
    """

    def __init__(
        self,
        sampler: PromptSampler,
        make: Callable[[PromptSampler, int], Iterable[StepBatch]],
        waiting: Sequence[StepBatch] = (),
    ) -> None:
        self._sampler, self._make = sampler, make
        self._waiting = deque(waiting)

    def after(self, step: int) -> StepBatch | None:
        """Return the batch for the step after `step`; None if there is none."""
        if not self._waiting:
            self._waiting.extend(self._make(self._sampler, step))
        return self._waiting.popleft() if self._waiting else None

    def save(self, write: WriteFile) -> dict[str, Any]:
        """Pass the waiting batches, if any, to `write`; returns the rest of the state."""
        if self._waiting:
            tensors = {f"{i}.{name}": t for i, each in enumerate(self._waiting) for name, t in _tensors(each.batch)}
            write(_FILE, map(save, [tensors]))
        return {
            "sampler": self._sampler.state_dict(),
            "waiting": [{"unit": each.batch.unit, "metrics": dict(each.metrics)} for each in self._waiting],
        }


def read_waiting(folder: Path, state: Mapping[str, Any]) -> list[StepBatch]:
    """Read the waiting batches that `BatchStream.save` wrote with `state`."""
    tensors = load_file(folder / _FILE) if state["waiting"] else {}
    waiting = []
    for index, each in enumerate(state["waiting"]):
        prefix = f"{index}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        fields = {name.removeprefix(_FIELD): tensor for name, tensor in own.items() if name.startswith(_FIELD)}
        waiting.append(StepBatch(RaggedBatch(own["tokens"], own["lengths"], fields, each["unit"]), each["metrics"]))
    return waiting


def _tensors(batch: RaggedBatch) -> list[tuple[str, Tensor]]:
    fields = [(f"{_FIELD}{name}", tensor.contiguous()) for name, tensor in batch.fields.items()]
    return [("tokens", batch.tokens), ("lengths", batch.lengths), *fields]
