"""Shards rows of tensors over the ranks that have the same tensors, as torch's FSDP2 shards parameters."""

from collections.abc import Collection, Iterator, Mapping

from converters.boxes import Box
from converters.layout import Placement, Shard


def rows_of(rows: int, part: int, parts: int) -> range:
    """The rows of part `part`. All parts have as many as the first, until none are left."""
    each = -(-rows // parts)
    return range(min(part * each, rows), min((part + 1) * each, rows))


def cut_rows(shard: Shard, part: int, parts: int, whole: Collection[str]) -> Shard:
    """Part `part` of `parts` of a `shard`; the tensors named in `whole` are not cut."""
    shapes = {name: shape for name, shape in shard.local_shapes.items() if name not in whole}
    rows = {name: rows_of(shape[0], part, parts) for name, shape in shapes.items()}
    cut_shapes = {name: (len(rows[name]), *shape[1:]) for name, shape in shapes.items()}
    return Shard(
        {**shard.local_shapes, **cut_shapes},
        list(cut_placements(shard.placements, rows)),
        list(_cut_padding(shard.padding, rows)),
    )


def cut_placements(placements: Collection[Placement], rows: Mapping[str, range]) -> Iterator[Placement]:
    """Cut placements to the given rows of each tensor, and count from the first of them; other tensors stay whole."""
    for placement in placements:
        hf_name, hf_box, name, box = placement
        own = rows.get(name)
        if own is None:
            yield placement
        elif inside := _within(box, own):
            first = inside.start[0] - box.start[0]
            start, stop = hf_box.start[0] + first, hf_box.start[0] + first + inside.shape[0]
            hf_inside = Box((start, *hf_box.start[1:]), (stop, *hf_box.stop[1:]))
            yield Placement(hf_name, hf_inside, name, _moved(inside, -own.start))


def _cut_padding(padding: Collection[tuple[str, Box]], rows: Mapping[str, range]) -> Iterator[tuple[str, Box]]:
    for name, box in padding:
        own = rows.get(name)
        if own is None:
            yield name, box
        elif inside := _within(box, own):
            yield name, _moved(inside, -own.start)


def _within(box: Box, rows: range) -> Box | None:
    start, stop = max(box.start[0], rows.start), min(box.stop[0], rows.stop)
    return Box((start, *box.start[1:]), (stop, *box.stop[1:])) if start < stop else None


def _moved(box: Box, rows: int) -> Box:
    return box.shift((rows, *(0 for _ in box.start[1:])))
