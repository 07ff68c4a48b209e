"""A rank of the benchmark: its tensors, and what the contenders need to know about the other ranks."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from converters.layout import Layout
from resharding import values
from resharding.memory import give_back
from resharding.processes import Place
from resharding.scenario import DTYPE, Scenario

Destination = Literal["engine", "engine, FP8", "changes, shared_memory", "changes, tcp", "changes, rdma", "megatron"]
DESTINATIONS: tuple[Destination, ...] = get_args(Destination)


class Party:
    """A trainer rank (the first ones), or an engine worker (the others) with tensors for each destination."""

    def __init__(self, place: Place, scenario: Scenario) -> None:
        self.place = place
        self.scenario = scenario
        self.sources = scenario.trainer.ranks
        self.is_source = place.rank < self.sources
        self.number = place.rank if self.is_source else place.rank - self.sources
        """Index among the trainer's ranks, or among the workers."""
        self.hf_dtypes = scenario.architecture.hf_dtypes(DTYPE)
        self.tensors: Mapping[str, Tensor] = {}
        """Tensors of a trainer rank, by name."""
        self._is_changed = False
        self.written: Mapping[Destination, Mapping[str, Tensor]] = {}
        """Tensors of a worker, by name."""
        if self.is_source:
            self.tensors = self._empty(scenario.trainer)
            values.fill(scenario.trainer, self.number, self.tensors, self.hf_dtypes)
        else:
            found = {destination: self.layout(destination) for destination in DESTINATIONS if self._holds(destination)}
            self.written = {destination: self._empty(layout) for destination, layout in found.items()}
        give_back()

    @property
    def workers(self) -> range:
        """Global ranks of the engine's workers."""
        return range(self.sources, self.place.ranks)

    def layout(self, destination: Destination) -> Layout:
        """The workers' layout of the model. Raises ValueError for an FP8 engine that would split blocks."""
        if destination == "engine, FP8":
            if self.scenario.fp8_engine is None:
                raise ValueError(f"an engine at {self.scenario.engine_name} cuts the model through blocks of FP8")
            return self.scenario.fp8_engine
        return self.scenario.megatron_engine if destination == "megatron" else self.scenario.engine

    def change(self, is_changed: bool) -> None:
        """Switch a trainer rank's weights between two versions, which differ in the last bit of some elements."""
        if is_changed != self._is_changed:
            values.change(self.tensors)
            self._is_changed = is_changed

    def exchange(self, said: Any) -> list[Any]:
        """All-gather a message, in rank order."""
        heard: list[Any] = [None] * self.place.ranks
        dist.all_gather_object(heard, said)
        return heard

    def wipe(self, destination: Destination) -> None:
        """Overwrite what was written."""
        if not self.is_source:
            values.wipe(self.written[destination])

    def wrong(self, destination: Destination) -> list[str]:
        """Names of a worker's tensors that differ from the trainer's."""
        if self.is_source:
            return []
        layout = self.layout(destination)
        whole = values.in_fp8 if layout is self.scenario.fp8_engine else values.as_trained
        found = values.wrong(layout, self.number, self.written[destination], self.hf_dtypes, whole)
        give_back()
        return found

    def _holds(self, destination: Destination) -> bool:
        return destination != "engine, FP8" or self.scenario.fp8_engine is not None

    def _empty(self, layout: Layout) -> dict[str, Tensor]:
        dtypes = self.scenario.dtypes(layout, self.number)
        shapes = layout.local_shapes(self.number)
        return {
            name: torch.zeros(shape, dtype=dtypes[name], device=self.scenario.device).fill_(0)
            for name, shape in shapes.items()
        }
