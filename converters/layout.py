"""Layouts: where each element of a HuggingFace tensor is in the tensors of a set of ranks."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from converters.boxes import Box, first_overlap

Shape = tuple[int, ...]


class Placement(NamedTuple):
    """`hf_box` of the HuggingFace tensor is stored, element for element, in `local_box` of a local tensor.

    A tuple, because a plan creates hundreds of thousands of them and a dataclass takes twice the time.

    Example: at TP 2, rank 1's half of a column-parallel weight of 256 rows is `Placement("lm_head.weight",
    Box((128, 0), (256, 64)), "output_layer.weight", Box((0, 0), (128, 64)))`.
    """

    hf_name: str
    hf_box: Box
    local_name: str
    local_box: Box

    def to_local(self, hf_piece: Box) -> Box:
        """The box of a part of `hf_box` in the local tensor."""
        return hf_piece.shift(tuple(map(sub, self.local_box.start, self.hf_box.start)))


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model: its tensors, the placements in them, and the boxes that no HuggingFace element fills.

    Example: `Shard({"w": (4, 2)}, [Placement("hf", Box((0, 0), (3, 2)), "w", Box((0, 0), (3, 2)))],
    padding=[("w", Box((3, 0), (4, 2)))])`.
    """

    local_shapes: Mapping[str, Shape]
    placements: Sequence[Placement]
    padding: Sequence[tuple[str, Box]] = ()


@dataclass(frozen=True)
class Layout:
    """A model cut over `ranks` ranks. `shard_of(rank)` computes one rank's shard independently of the others."""

    ranks: int
    hf_shapes: Mapping[str, Shape]
    shard_of: Callable[[int], Shard]
    only: Callable[[Collection[str]], Callable[[int], Sequence[Placement]]] | None = None
    """A faster implementation of `placements_of`, for layouts that know where a tensor is."""

    def shard(self, rank: int) -> Shard:
        """The shard of `rank`. Raises IndexError if the layout does not have this rank."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} of a layout of {self.ranks} ranks")
        return self.shard_of(rank)

    def placements(self, rank: int) -> Sequence[Placement]:
        """The placements of HuggingFace elements in the tensors of `rank`."""
        return self.shard(rank).placements

    def placements_of(self, hf_names: Collection[str]) -> Callable[[int], Sequence[Placement]]:
        """Return a function from a rank to its placements of these tensors, in the order of `placements`."""
        if self.only:
            return self.only(hf_names)
        return lambda rank: [each for each in self.placements(rank) if each.hf_name in hf_names]

    def local_shapes(self, rank: int) -> Mapping[str, Shape]:
        """The names and shapes of the tensors of `rank`."""
        return self.shard(rank).local_shapes


def check_tiling(shard: Shard) -> None:
    """Raise ValueError unless every element of the shard's tensors is placed, or declared as padding, exactly once."""
    placed: dict[str, list[tuple[Box, Box]]] = defaultdict(list)
    for placement in shard.placements:
        placed[placement.local_name].append((placement.hf_box, placement.local_box))
    for name, box in shard.padding:
        placed[name].append((box, box))
    for name in placed.keys() - shard.local_shapes.keys():
        raise ValueError(f"there is something placed in {name}, which the rank does not hold")
    # Most tensors have the same placements as others: those of other layers and experts.
    checked = set()
    for name, shape in shard.local_shapes.items():
        key = tuple(shape), tuple(placed[name])
        if key not in checked:
            _check_tensor(name, *key)
            checked.add(key)


def _check_tensor(name: str, shape: Shape, placed: Sequence[tuple[Box, Box]]) -> None:
    """Check one tensor; `placed` are pairs of a HuggingFace box and its box in the local tensor."""
    for hf_box, box in placed:
        if hf_box.shape != box.shape:
            raise ValueError(f"{hf_box} is placed in {box} of {name}, which has a different shape")
        if box.intersect(Box.whole(shape)) != box:
            raise ValueError(f"a box of {name} leads out of its shape {shape}")
    boxes = [box for _, box in placed]
    if overlap := first_overlap(boxes):
        raise ValueError(f"the boxes {overlap[0]} and {overlap[1]} of {name} overlap")
    if (elements := sum(box.size for box in boxes)) != math.prod(shape):
        raise ValueError(f"only {elements} of the {math.prod(shape)} elements of {name} are placed")
