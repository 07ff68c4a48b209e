"""Attention with shared prefixes present once: each token attends to its own node, and to the prefixes before it.

Each part is one call of a varlen kernel, which also returns the log-sum-exp of its scores, by which the parts are
merged into one softmax. Backward each part gets the merged output and log-sum-exp, from which it computes its part of
the gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.attention.attention import as_wide_as, attend_step_by_step
from megatron_ext.attention.rotary import PackedSequences
from megatron_ext.attention.varlen_kernels import Merged, VarlenSequences, kernel_for, merge
from megatron_ext.packing.shared_prefixes import Level

Place = tuple[int, int]
"""Tokens [start, stop)."""


class _Part(NamedTuple):
    """N ranges [start, stop) of queries, each attending to one range of keys."""

    queries: Sequence[Place]
    keys: Sequence[Place]
    is_causal: bool
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    """Lengths of the query ranges and of the key ranges."""

    @classmethod
    def of(cls, queries: Sequence[Place], keys: Sequence[Place], *, is_causal: bool) -> "_Part":
        """Make a part, computing its lengths."""
        return cls(queries, keys, is_causal, (_lengths(queries), _lengths(keys)))

    def sequences(self, scale: float) -> VarlenSequences:
        """The part as a kernel's argument."""
        return VarlenSequences(*self.lengths, self.is_causal, scale)


@dataclass
class SharedSequences(PackedSequences):
    """The concatenated nodes of a `SharedPart`, for every layer.

    Example: SharedSequences(bounds=part.bounds, levels=part.levels)
    """

    bounds: tuple[int, ...] = ()
    """The values of `cu_seqlens_q` on the host: reading that tensor would synchronize with the device."""
    levels: tuple[Level, ...] = ()
    positions: Tensor | None = None
    """long[L], the position of each token in its sequence."""

    @cached_property
    def parts(self) -> list[_Part]:
        """The parts of attention, the same in every layer: own nodes, then one part per level of prefixes."""
        own = _own(self.bounds)
        behind = [
            _Part.of(
                [(each.end, each.stop) for each in level], [(each.start, each.end) for each in level], is_causal=False
            )
            for level in self.levels
        ]
        return [_Part.of(own, own, is_causal=True), *behind]


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shared: SharedSequences,
    *,
    softmax_scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal self-attention of concatenated nodes, whose tokens also attend to the prefixes before them.

    Shapes are those of `packed_causal_attention`. Memory is linear in the number of tokens; it is quadratic in those of
    a tree with `dropout`, `softcap` or `window`, and on devices without a kernel.
    """
    kernel = kernel_for(query)
    if kernel is None or dropout or softcap is not None or window is not None:
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "dropout": dropout, "softcap": softcap}
        trees = _trees(shared.bounds, shared.levels)
        outputs = [_attend_to_visible(query, key, value, tree, window, options) for tree in trees]
        return torch.cat(outputs)
    width = value.shape[-1]
    return _OwnAndPrefixes.apply(query, key, as_wide_as(key, value), shared.parts, kernel, softmax_scale)[..., :width]


def _own(bounds: Sequence[int]) -> list[Place]:
    return [place for place in pairwise(bounds) if place[0] < place[1]]


class _OwnAndPrefixes(torch.autograd.Function):
    """Causal attention to a token's own node, and to each prefix before it, in one softmax."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        query, key, value, parts, kernel, scale = inputs
        output, total = kernel.forward(query, key, value, parts[0].sequences(scale))
        if len(parts) > 1:
            output, total = output.to(total.dtype), total.contiguous()
        for part in parts[1:]:
            found = kernel.forward(
                _rows(query, part.queries), *(_rows(each, part.keys) for each in (key, value)), part.sequences(scale)
            )
            for (start, stop), behind, behind_total in _by_place(part.queries, *found):
                merge(output[start:stop], total[start:stop], behind, behind_total)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.parts, ctx.kernel, ctx.scale = parts, kernel, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        parts: list[_Part] = ctx.parts
        whole = Merged(gradient, output, total)
        sums: list[Tensor] = ctx.kernel.backward(query, key, value, whole, parts[0].sequences(ctx.scale))
        if len(parts) > 1:
            sums = [each.to(total.dtype) for each in sums]
        for part in parts[1:]:
            found = ctx.kernel.backward(
                _rows(query, part.queries),
                *(_rows(each, part.keys) for each in (key, value)),
                Merged(*(_rows(each, part.queries) for each in whole)),
                part.sequences(ctx.scale),
            )
            for total_of, of_part, places in zip(sums, found, (part.queries, part.keys, part.keys), strict=True):
                for (start, stop), rows in _by_place(places, of_part):
                    total_of[start:stop] += rows
        return *(each.to(query.dtype) for each in sums), None, None, None


def _lengths(places: Sequence[Place]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in places)


def _rows(values: Tensor, places: Sequence[Place]) -> Tensor:
    """Values at the places, one after another; a single place is not copied."""
    rows = [values[start:stop] for start, stop in places]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _by_place(places: Sequence[Place], *values: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each place, with the rows of `values` that belong there."""
    lengths = _lengths(places)
    yield from zip(places, *(each.split(lengths) for each in values), strict=True)


def _trees(bounds: Sequence[int], levels: Sequence[Level]) -> Iterator[tuple[int, int, Tensor]]:
    """Each tree of nodes: its range, and bool[L, L], whether a query (row) sees a key."""
    own = _own(bounds)
    roots = [(each.start, each.stop) for each in levels[0]] if levels else []
    inside = {place for place in own for start, stop in roots if start <= place[0] < stop}
    for first, last in sorted([*roots, *(place for place in own if place not in inside)]):
        visible = torch.zeros(last - first, last - first, dtype=torch.bool)
        for start, stop in own:
            if first <= start < last:
                visible[start - first : stop - first, start - first : stop - first].fill_(True)
        for each in (prefix for level in levels for prefix in level):
            if first <= each.start < last:
                visible[each.end - first : each.stop - first, each.start - first : each.end - first] = True
        yield first, last, visible.tril_()


def _attend_to_visible(
    query: Tensor, key: Tensor, value: Tensor, tree: tuple[int, int, Tensor], window: int | None, options: Any
) -> Tensor:
    first, last, visible = tree
    if window is not None:
        position = visible.sum(1)
        visible = visible & (position[:, None] - position[None, :] < window)
    query, key, value = (each[None, first:last] for each in (query, key, value))
    return attend_step_by_step(query, key, value, ~visible.to(query.device), **options)[0]
