"""Regions: boxes whose elements are all held by the same ranks, and the parts that they are cut into."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from converters.boxes import Box


@dataclass(frozen=True, slots=True)
class Region:
    """A box of an HF tensor, and all ranks that hold it, in ascending order.

    Example: `Region(Box((0, 0), (128, 64)), owners=(0, 2))`: ranks 0 and 2 hold the first 128 rows.
    """

    box: Box
    owners: tuple[int, ...]


def regions(wanted: Box, held: Iterable[tuple[Box, Iterable[int]]]) -> list[Region]:
    """Cut `wanted` into regions, given every box of the tensor that is held, and by which ranks.

    Elements that no rank holds are in regions without owners. An empty box has no regions.
    """
    found = [Region(wanted, ())] if wanted.size else []
    for box, ranks in held:
        common = box.intersect(wanted)
        if common is None:
            continue
        split: list[Region] = []
        for region in found:
            piece = region.box.intersect(common)
            if piece is None:
                split.append(region)
                continue
            split.append(Region(piece, tuple(sorted({*region.owners, *ranks}))))
            if piece != region.box:
                split.extend(Region(rest, region.owners) for rest in region.box.subtract(piece))
        found = split
    return found


@dataclass(frozen=True)
class Cutting:
    """The places where a box may be cut so that several ranks share sending it.

    Boxes are cut only in the first dimension, at multiples of `grain` in the tensor's coordinates, which keeps FP8
    blocks of 128 x 128 whole. Parts have at least `smallest` elements on average, because each part is a separate copy.

    Example: a box of 300 rows and 10 million elements, cut for two ranks, gives rows 0 to 128 and 128 to 300.
    """

    grain: int = 128
    smallest: int = 2**16

    def cut(self, box: Box, parts: int) -> list[Box]:
        """Cut a box into up to `parts` boxes, as equal as the grain allows."""
        parts = min(parts, box.size // self.smallest)
        if parts <= 1:
            return [box]
        start, stop = box.start[0], box.stop[0]
        # Cells of the grain; the first and the last cell may be incomplete.
        first, last = start // self.grain, -(-stop // self.grain)
        parts = min(parts, last - first)
        edges = [(first + (last - first) * part // parts) * self.grain for part in range(parts + 1)]
        edges[0], edges[-1] = start, stop
        return [Box((a, *box.start[1:]), (b, *box.stop[1:])) for a, b in pairwise(edges)]


DEFAULT_CUTTING = Cutting()
