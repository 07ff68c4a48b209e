"""Classes of equal tensors: the same ranks hold, and the same ranks want, the same boxes of each.

A model of 671B parameters has 45,000 tensors, but only a few hundred classes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from converters.boxes import Box
from converters.cost.formats import TensorFormat
from converters.layout import Layout, Shard, check_tiling

Boxes = Mapping[Box, Mapping[int, int]]
"""Box of an HF tensor -> rank -> number of the rank's placements of just this box."""


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one format with the same owners and the same workers that want them."""

    format: TensorFormat
    names: Sequence[str]
    held: Boxes
    wanted: Boxes


def tensor_classes(source: Layout, destination: Layout, formats: Mapping[str, TensorFormat]) -> Iterator[TensorClass]:
    """All tensors of two layouts, in classes.

    Raises ValueError if the destination's boxes overlap or leave a gap.
    """
    held, wanted = _Patterns(source), _Patterns(destination, check_tiling)
    members: dict[tuple[TensorFormat, int, int], list[str]] = defaultdict(list)
    for name in destination.hf_shapes:
        members[formats[name], held.of[name], wanted.of[name]].append(name)
    for (tensor_format, held_pattern, wanted_pattern), names in members.items():
        yield TensorClass(tensor_format, names, held.boxes(held_pattern), wanted.boxes(wanted_pattern))


class _Patterns:
    """Numbers the placements of every tensor; tensors whose placements differ only in names get the same number.

    A pattern is a shorter pattern plus one placement; pattern 0 is empty.
    """

    def __init__(self, layout: Layout, check: Callable[[Shard], object] = bool) -> None:
        numbers_of_boxes: dict[Box, int] = {}
        numbers: dict[tuple[int, int, int], int] = {}
        self.of = of = dict.fromkeys(layout.hf_shapes, 0)
        for rank in range(layout.ranks):
            shard = layout.shard(rank)
            check(shard)
            for placement in shard.placements:
                name = placement.hf_name
                box = numbers_of_boxes.setdefault(placement.hf_box, len(numbers_of_boxes))
                of[name] = numbers.setdefault((of[name], rank, box), len(numbers) + 1)
        self._steps, self._box_of = list(numbers), list(numbers_of_boxes)

    def boxes(self, pattern: int) -> Boxes:
        """Boxes in the placements of a pattern."""
        steps = []
        while pattern:
            pattern, rank, number = self._steps[pattern - 1]
            steps.append((rank, self._box_of[number]))
        boxes: dict[Box, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for rank, box in reversed(steps):
            boxes[box][rank] += 1
        return boxes
