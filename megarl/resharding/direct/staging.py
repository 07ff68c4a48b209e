"""Staging: assembles blocks that are split over several sources, and quantises them on the worker."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.boxes import Box
from converters.number_formats import NumberFormat
from megarl.resharding.direct.messages_by_peer import DestinationMessages
from megarl.resharding.direct.quantised_shard import QuantisedShard
from megatron_ext.memory.host_copies import bytes_of


@dataclass(frozen=True)
class _Blocks:
    """Whole blocks in a staging tensor, and the codes and scales that they are quantised to."""

    values: Tensor
    codes: Tensor
    codes_name: str
    scales: Tensor
    scales_name: str


class Staging:
    """The staging tensors of a worker that receives `messages`: one for each place that receives values.

    They have the shape of the worker's codes, and the dtype of the policy. There are none if no block is split.
    """

    def __init__(
        self, shard: QuantisedShard | None, messages: DestinationMessages, tensors: Mapping[str, Tensor]
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._blocks: list[_Blocks] = []
        if shard is None:
            return
        self._number_format = shard.quantisation.number_format
        for name, boxes in _values_that_come(shard, messages).items():
            place = shard.staged[name]
            codes = tensors[place.codes_name][place.codes_box.slices()]
            scales = tensors[place.scales_name][place.scales_box.slices()]
            values = torch.zeros(codes.shape, dtype=shard.quantisation.values, device=codes.device)
            self.tensors[name] = values
            for box in _hull(boxes, self._number_format, codes.shape):
                own = scales[self._number_format.scales_box(box).slices()]
                found = values[box.slices()], codes[box.slices()], place.codes_name, own, place.scales_name
                self._blocks.append(_Blocks(*found))

    def quantise(self) -> None:
        """Write codes and scales to the engine's tensors. Raises ValueError for values that cannot be quantised."""
        for blocks, codes, scales in self._quantised():
            blocks.codes.copy_(codes)
            blocks.scales.copy_(scales)

    def differing(self) -> set[str]:
        """The names of the engine's tensors in which `quantise` would change a byte; writes nothing."""
        found: set[str] = set()
        for blocks, codes, scales in self._quantised():
            for name, there, here in (
                (blocks.codes_name, blocks.codes, codes),
                (blocks.scales_name, blocks.scales, scales),
            ):
                if not torch.equal(bytes_of(there), bytes_of(here)):
                    found.add(name)
        return found

    def _quantised(self) -> Iterator[tuple[_Blocks, Tensor, Tensor]]:
        for blocks in self._blocks:
            try:
                yield blocks, *self._number_format.quantise(blocks.values)
            except ValueError as error:
                raise ValueError(f"{blocks.codes_name}: {error}") from error


def staged_bytes(shard: QuantisedShard, messages: DestinationMessages) -> int:
    """Size of the staging tensors of a worker that receives `messages`."""
    places = (shard.staged[name].codes_box for name in _values_that_come(shard, messages))
    return sum(place.size for place in places) * shard.quantisation.values.itemsize


def _values_that_come(shard: QuantisedShard, messages: DestinationMessages) -> dict[str, list[Box]]:
    """Map the name of each staging tensor to the boxes of it that are written."""
    found: dict[str, list[Box]] = defaultdict(list)
    for by_peer in (messages.direct, messages.relays_in):
        for of_peer in by_peer.values():
            for message in of_peer:
                for piece in message.pieces:
                    if piece.destination_name in shard.staged:
                        found[piece.destination_name].append(piece.destination_box)
    return found


def _hull(boxes: Iterable[Box], number_format: NumberFormat, shape: tuple[int, ...]) -> Iterator[Box]:
    """All blocks that `boxes` reach into, as boxes of elements: one for each run of blocks in a row of blocks.

    Rows of equal runs are one box.
    """
    columns: dict[int, set[int]] = defaultdict(set)
    for box in boxes:
        blocks = number_format.scales_box(box)
        for row in range(blocks.start[0], blocks.stop[0]):
            columns[row].update(range(blocks.start[1], blocks.stop[1]))
    runs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in sorted(columns):
        for run in _runs(sorted(columns[row])):
            runs[run].append(row)
    height, width = number_format.block
    for (left, right), rows in runs.items():
        for top, bottom in _runs(rows):
            start = top * height, left * width
            yield Box(start, (min(bottom * height, shape[0]), min(right * width, shape[1])))


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The half-open intervals that contain exactly these ascending `numbers`."""
    start = stop = None
    for number in numbers:
        if number == stop:
            stop += 1
            continue
        if start is not None and stop is not None:
            yield start, stop
        start, stop = number, number + 1
    if start is not None and stop is not None:
        yield start, stop
