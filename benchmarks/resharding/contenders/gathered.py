"""The way of most systems: gather whole HuggingFace tensors, send them to every worker, and let each take its part.

As in verl and slime, bucket by bucket: the ranks of a pipeline stage all-gather their shards over gloo, and the first
of them assembles the whole tensors and sends them to all workers. It is more efficient than they are: no value is
gathered from two ranks, nothing is assembled twice, all views are created once, and the stages work concurrently.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from converters.plan import Plan
from megarl.resharding.direct.transports.endpoint import BUCKETS
from resharding.contenders import whole_tensors
from resharding.contenders.hand_over import HandOver, Makes
from resharding.contenders.whole_tensors import NO_COPIES, Bucket, Copies, box_of, packed, packed_bytes
from resharding.party import Party


class Gathered:
    """Gathers tensors into the engine's."""

    def __init__(self, party: Party, hand_over: Makes) -> None:
        stages = _stages(party)
        groups = {ranks[0]: dist.new_group(ranks) for ranks in stages}
        buckets = {ranks[0]: _buckets(party, ranks) for ranks in stages}
        way = hand_over(party, {first: max(each.size_bytes for each in of) for first, of in buckets.items()})
        self._party = party
        self._side: _Stage | _Worker
        if party.is_source:
            (ranks,) = (ranks for ranks in stages if party.place.rank in ranks)
            self._side = _Stage(party, ranks, groups[ranks[0]], buckets[ranks[0]], way)
        else:
            self._side = _Worker(party, buckets, way)
        self.moved_bytes = self._side.moved_bytes

    def run(self) -> None:
        """Gather and send, or receive."""
        self._side.run()

    def wipe(self) -> None:
        """Overwrite what was written."""
        self._party.wipe("engine")

    def wrong(self) -> list[str]:
        """Names of tensors with a wrong value."""
        return self._party.wrong("engine")


class _Stage:
    """A rank of a pipeline stage, whose tensor-parallel and expert-parallel groups are the same."""

    def __init__(
        self, party: Party, ranks: Sequence[int], group: Any, buckets: Sequence[Bucket], way: HandOver
    ) -> None:
        self._group, self._buckets, self._way = group, buckets, way
        self._first = ranks[0]
        self._gives = party.place.rank == self._first
        plan = Plan(party.scenario.trainer, party.scenario.huggingface)
        transfers = {rank: plan.transfers_from(rank) for rank in ranks}
        shares = [{rank: bucket.of(transfers[rank]) for rank in ranks} for bucket in buckets]
        sizes = [max(packed_bytes(share, party.hf_dtypes) for share in of.values()) for of in shares]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        all_shares = torch.zeros(max(sizes) * len(ranks), dtype=torch.uint8)
        self._gathers: list[tuple[Tensor, Tensor]] = []
        self._packs: list[Copies] = []
        self._assemblies: list[Copies] = []
        for number, (bucket, size) in enumerate(zip(buckets, sizes, strict=True)):
            mine = shares[number][party.place.rank]
            held = [box_of(party.tensors[each.source_name], each.source_box) for each in mine]
            self._packs.append(Copies(packed(mine, own, party.hf_dtypes), held))
            gathered = all_shares[: size * len(ranks)]
            self._gathers.append((gathered, own[:size]))
            assembly = NO_COPIES
            if self._gives:
                memory = way.memory[self._first][number % BUCKETS]
                whole = bucket.tensors(memory, party.scenario.huggingface.hf_shapes, party.hf_dtypes)
                for rank, share in zip(ranks, gathered.split(size), strict=True):
                    theirs = shares[number][rank]
                    into = [box_of(whole[each.hf_name], each.destination_box) for each in theirs]
                    assembly = assembly.then(Copies(into, packed(theirs, share, party.hf_dtypes)))
            self._assemblies.append(assembly)
        given = sum(bucket.size_bytes for bucket in buckets) * len(party.workers)
        self.moved_bytes = sum(sizes) * (len(ranks) - 1) + (given if self._gives else 0)

    def run(self) -> None:
        for number, bucket in enumerate(self._buckets):
            self._packs[number].run()
            dist.all_gather_into_tensor(*self._gathers[number], group=self._group)
            if self._gives:
                if number >= BUCKETS:
                    self._way.wait_until_taken((self._first, number - BUCKETS))
                self._assemblies[number].run()
                self._way.give((self._first, number), bucket.size_bytes)
        if self._gives:
            for number in range(max(0, len(self._buckets) - BUCKETS), len(self._buckets)):
                self._way.wait_until_taken((self._first, number))


class _Worker:
    """A worker: it takes the buckets of all stages in turn, and receives the next one while it copies."""

    moved_bytes = 0

    def __init__(self, party: Party, buckets: Mapping[int, Sequence[Bucket]], way: HandOver) -> None:
        self._way = way
        self._ahead = len(buckets)
        transfers = Plan(party.scenario.huggingface, party.scenario.engine).transfers_into(party.number)
        written = party.written["engine"]
        keys = sorted((number, first) for first, of in buckets.items() for number in range(len(of)))
        self._order = [((first, number), buckets[first][number].size_bytes) for number, first in keys]
        self._copies = []
        for (first, number), _ in self._order:
            bucket = buckets[first][number]
            memory = way.memory[first][number % BUCKETS]
            whole = bucket.tensors(memory, party.scenario.huggingface.hf_shapes, party.hf_dtypes)
            parts = bucket.of(transfers)
            into = [box_of(written[each.destination_name], each.destination_box) for each in parts]
            self._copies.append(Copies(into, [box_of(whole[each.hf_name], each.source_box) for each in parts]))

    def run(self) -> None:
        for key, size in self._order[: self._ahead]:
            self._way.expect(key, size)
        for position, (key, _) in enumerate(self._order):
            self._way.take(key)
            self._copies[position].run()
            self._way.release(key)
            # Not earlier: if one stage has more buckets than the others, this is the memory that was just copied.
            for after, size in self._order[position + self._ahead : position + self._ahead + 1]:
                self._way.expect(after, size)


def _stages(party: Party) -> list[list[int]]:
    """The ranks of each pipeline stage."""
    stages: dict[int, list[int]] = {}
    for rank in range(party.sources):
        stages.setdefault(party.scenario.trainer_sizes.coordinates(rank).pipeline, []).append(rank)
    return list(stages.values())


def _buckets(party: Party, ranks: Sequence[int]) -> list[Bucket]:
    scenario = party.scenario
    held = {placement.hf_name for rank in ranks for placement in scenario.trainer.placements(rank)}
    shapes = scenario.huggingface.hf_shapes
    names = [name for name in shapes if name in held]
    return whole_tensors.buckets(names, shapes, party.hf_dtypes, scenario.bucket_bytes)
