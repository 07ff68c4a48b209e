"""Plans: which rank sends which elements to which rank so that one layout becomes another."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from converters.boxes import Box
from converters.layout import Layout, Placement, check_tiling


@dataclass(frozen=True, slots=True)
class Transfer:
    """`source_box` of a tensor of one rank goes, element for element, into `destination_box` of another's."""

    hf_name: str
    source_rank: int
    source_name: str
    source_box: Box
    destination_rank: int
    destination_name: str
    destination_box: Box


@dataclass(frozen=True, slots=True)
class _Holder:
    rank: int
    placement: Placement


_Holders = Mapping[str, Mapping[Box, list[_Holder]]]
"""HuggingFace name -> box of it -> who holds just this box."""


def plan(source: Layout, destination: Layout) -> list[Transfer]:
    """The transfers that write every element of `destination`, but its padding, exactly once.

    Where several ranks hold an element the one that has sent the fewest elements so far sends it. The same
    layouts always give the same list, ordered by destination rank.
    Raises ValueError where the destination's boxes overlap or leave a gap, where no source rank holds an
    element, and where the layouts disagree on the shape of a HuggingFace tensor.
    """
    holders = _holders(source)
    sent = [0] * source.ranks
    transfers: list[Transfer] = []
    for rank in range(destination.ranks):
        shard = destination.shard(rank)
        check_tiling(shard)
        for placement in shard.placements:
            name = placement.hf_name
            if source.hf_shapes.get(name) != destination.hf_shapes[name]:
                raise ValueError(
                    f"{name} has shape {source.hf_shapes.get(name)} in the source and"
                    f" {destination.hf_shapes[name]} in the destination"
                )
            transfers.extend(_fill(rank, placement, holders.get(name, {}), sent))
    return transfers


def _holders(source: Layout) -> _Holders:
    holders: dict[str, dict[Box, list[_Holder]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(source.ranks):
        for placement in source.placements(rank):
            holders[placement.hf_name][placement.hf_box].append(_Holder(rank, placement))
    return holders


def _fill(rank: int, wanted: Placement, holders: Mapping[Box, list[_Holder]], sent: list[int]) -> Iterator[Transfer]:
    """The transfers into one placement; adds to the elements `sent` by each source rank."""
    missing = [wanted.hf_box] if wanted.hf_box.size else []
    for held_box, replicas in holders.items():
        still_missing: list[Box] = []
        for box in missing:
            piece = box.intersect(held_box)
            if piece is None:
                still_missing.append(box)
                continue
            still_missing.extend(box.subtract(piece))
            holder = min(replicas, key=lambda replica: sent[replica.rank])
            sent[holder.rank] += piece.size
            yield Transfer(
                wanted.hf_name,
                holder.rank,
                holder.placement.local_name,
                holder.placement.to_local(piece),
                rank,
                wanted.local_name,
                wanted.to_local(piece),
            )
        missing = still_missing
        if not missing:
            return
    if missing:
        raise ValueError(f"no source rank holds {missing[0]} of {wanted.hf_name}")
