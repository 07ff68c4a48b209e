"""Owners: the placements of several ranks, grouped by the box of the HF tensor that they hold."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from converters.boxes import Box
from converters.errors import UserError
from converters.layout import Placement, Shape

Owners = Mapping[str, Mapping[Box, Mapping[int, Sequence[Placement]]]]
"""HF name -> box -> rank -> the rank's placements of exactly this box, rarely more than one."""


def owners_by_box(
    ranks: Iterable[int],
    placements_of: Callable[[int], Sequence[Placement]],
    boxes_of: Sequence[Placement] | None = None,
) -> Owners:
    """The owners among `ranks` of each box, or only of the boxes of the placements `boxes_of` if given."""
    found: dict[str, dict[Box, dict[int, list[Placement]]]] = {}
    for placement in boxes_of or ():
        found.setdefault(placement.hf_name, {})[placement.hf_box] = {}
    for rank in ranks:
        for placement in placements_of(rank):
            boxes = found.get(placement.hf_name)
            if boxes is None:
                if boxes_of is not None:
                    continue
                boxes = found[placement.hf_name] = {}
            of_box = boxes.get(placement.hf_box)
            if of_box is not None:
                of_box.setdefault(rank, []).append(placement)
            elif boxes_of is None:
                boxes[placement.hf_box] = {rank: [placement]}
    return found


def numbered(placements: Sequence[Placement]) -> Iterator[tuple[Placement, int]]:
    """Yield each placement of a rank, with the number of earlier placements of the same box."""
    seen: dict[tuple[str, Box], int] = {}
    for placement in placements:
        key = placement.hf_name, placement.hf_box
        number = seen.get(key, 0)
        seen[key] = number + 1
        yield placement, number


def check_same_model(source: Mapping[str, Shape], destination: Mapping[str, Shape]) -> None:
    """Raise UserError unless two layouts have the same HF tensors."""
    for one, other, here, there in (
        (source, destination, "source", "destination"),
        (destination, source, "destination", "source"),
    ):
        if missing := [name for name in one if name not in other]:
            raise UserError(
                f"the {here} has {missing[0]}, one of {len(missing)} tensors that the {there} does not have; both must"
                " be layouts of the same model"
            )
    for name, shape in source.items():
        if tuple(shape) != tuple(destination[name]):
            raise UserError(
                f"{name} has shape {list(shape)} in the source and {list(destination[name])} in the destination; both"
                " must be layouts of the same model"
            )
