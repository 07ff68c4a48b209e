"""A worker's quantised tensors: which parts of a transfer travel as codes and scales, and which as values.

A box of whole blocks is quantised at its source. A block that the source's sharding splits travels as values into a
staging tensor of the worker, which quantises it once it is complete (`staging`). Both ways give the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import sub
from typing import NamedTuple

import torch

from converters.boxes import Box
from converters.layout import Placement, Shape, Shard
from converters.number_formats import NumberFormat
from converters.plan import Transfer
from megarl.resharding.direct.typed_transfers import Scales, TypedTransfer, plain


class CutBlocksError(Exception):
    """The engine's sharding splits quantisation blocks, so it makes scales of its own. The message says where."""


@dataclass(frozen=True)
class Quantisation:
    """The number format that the engines hold, and the dtype of the policy's matrices that are quantised to it.

    Example: `Quantisation(FP8_BLOCK, torch.bfloat16)`.
    """

    number_format: NumberFormat
    values: torch.dtype


class Place(NamedTuple):
    """A box of a HuggingFace tensor on a worker: where its codes, its scales and its staged values are."""

    hf_name: str
    hf_box: Box
    codes_name: str
    codes_box: Box
    scales_name: str
    scales_box: Box
    staging_name: str


class QuantisedShard:
    """The tensors of one worker; the HuggingFace tensors `names` are in a number format.

    Raises CutBlocksError if the worker does not hold whole blocks.
    """

    def __init__(
        self, shard: Shard, quantisation: Quantisation, names: frozenset[str], hf_shapes: Mapping[str, Shape]
    ) -> None:
        self._shard = shard
        self.quantisation = quantisation
        self._number_format = quantisation.number_format
        self._shapes = hf_shapes
        self._names = names
        self._places: dict[str, list[Place]] = {}
        for place in self._all_places():
            self._places.setdefault(place.codes_name, []).append(place)

    @cached_property
    def without_scales(self) -> Shard:
        """The shard without its scales, as the policy has no such tensors: scales travel with their codes."""
        scales = {place.scales_name for places in self._places.values() for place in places}
        return Shard(
            {name: shape for name, shape in self._shard.local_shapes.items() if name not in scales},
            [placement for placement in self._shard.placements if placement.local_name not in scales],
            [(name, box) for name, box in self._shard.padding if name not in scales],
        )

    @cached_property
    def staged(self) -> Mapping[str, Place]:
        """The places by the name of their staging tensor."""
        return {place.staging_name: place for places in self._places.values() for place in places}

    def typed_transfers(self, transfer: Transfer, dtypes: Mapping[str, torch.dtype]) -> Iterator[TypedTransfer]:
        """Yield the typed transfers of a transfer from a source, which holds values; `dtypes` are this worker's."""
        found = self._find(transfer.destination_name, transfer.destination_box)
        source = transfer.source_name, transfer.source_box
        if found is None:
            yield plain(transfer, dtypes)
            return
        place, piece = found
        if not self._is_whole(place, piece):
            yield TypedTransfer(*source, place.staging_name, piece.relative_to(place.hf_box), self.quantisation.values)
            return
        scales = Scales(place.scales_name, self._scales_of(place, piece), self._number_format.name)
        yield replace(plain(transfer, dtypes), scales=scales)

    def relayed(
        self, transfer: Transfer, neighbour: "QuantisedShard", dtypes: Mapping[str, torch.dtype]
    ) -> Iterator[TypedTransfer]:
        """Yield the typed transfers of a relay from a neighbour, which holds codes and scales, or staged values."""
        there = neighbour._find(transfer.source_name, transfer.source_box)
        here = self._find(transfer.destination_name, transfer.destination_box)
        if there is None or here is None:
            yield plain(transfer, dtypes)
            return
        (their, piece), (own, _) = there, here
        if not self._is_whole(own, piece):
            boxes = piece.relative_to(their.hf_box), piece.relative_to(own.hf_box)
            yield TypedTransfer(their.staging_name, boxes[0], own.staging_name, boxes[1], self.quantisation.values)
            return
        yield plain(transfer, dtypes)
        scales = neighbour._scales_of(their, piece), self._scales_of(own, piece)
        yield TypedTransfer(their.scales_name, scales[0], own.scales_name, scales[1], self._number_format.scales)

    def _all_places(self) -> Iterator[Place]:
        by_name: dict[str, list[Placement]] = {}
        for placement in self._shard.placements:
            by_name.setdefault(placement.hf_name, []).append(placement)
        for name in (name for name in by_name if name in self._names):
            scales = by_name.get(self._number_format.scales_name(name), [])
            boxes = [self._number_format.scales_box(placement.hf_box) for placement in by_name[name]]
            if [each.hf_box for each in scales] != boxes:
                raise CutBlocksError(f"the engine cuts {name} through its blocks")
            for codes, own in zip(by_name[name], scales, strict=True):
                if not self._number_format.is_whole(codes.hf_box, self._shapes[name]):
                    raise CutBlocksError(f"the engine cuts {name} through its blocks")
                staging = f"values of {name} for {codes.local_name} {codes.local_box.start}"
                yield Place(*codes, own.local_name, own.local_box, staging)

    def _find(self, name: str, box: Box) -> tuple[Place, Box] | None:
        """The place that contains a box of a local tensor, and the corresponding box of the HuggingFace tensor."""
        for place in self._places.get(name, ()):
            if place.codes_box.intersect(box) == box:
                return place, box.shift(_distance(place.hf_box, place.codes_box))
        return None

    def _is_whole(self, place: Place, piece: Box) -> bool:
        return self._number_format.is_whole(piece, self._shapes[place.hf_name])

    def _scales_of(self, place: Place, piece: Box) -> Box:
        """The box of the scales tensor that belongs to a box of the HuggingFace tensor."""
        origin = self._number_format.scales_box(place.hf_box)
        return self._number_format.scales_box(piece).shift(_distance(place.scales_box, origin))


def _distance(one: Box, other: Box) -> Sequence[int]:
    return tuple(map(sub, one.start, other.start))
