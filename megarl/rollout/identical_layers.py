"""Traces one of several identical layers: the others keep their weights in the same way, in their own tensors.

Tracing all layers of a model of 671 billion parameters takes a quarter of a minute per worker, and most of them give
the same trace.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from converters.layout import Placement, Shape, Shard
from converters.layouts.traced_layout import LoadTrace

_NUMBER = re.compile(r"(?<=\blayers\.)\d+(?=\.|$)")
T = TypeVar("T")


class _Kind(NamedTuple):
    """Everything that the trace of a layer depends on, by names within the layer."""

    modules: frozenset[tuple[str, type, type, str | None]]
    """Name, class, class of its quantisation method, and why its parameters may not be written directly."""
    parameters: frozenset[tuple[str, Shape, torch.dtype]]
    tensors: frozenset[tuple[str, Shape, torch.dtype]]
    """Tensors of the checkpoint."""


def group_identical_layers(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    reason: Callable[[nn.Module], str | None],
    hf_shapes: Mapping[str, Shape],
    hf_dtypes: Mapping[str, torch.dtype],
) -> dict[int, list[int]]:
    """Map the first layer of each kind to all layers of the kind, itself included.

    Layers have the same numbers in checkpoint and engine.
    """
    modules = _by_layer(
        (name, (type(module), type(getattr(module, "quant_method", None)), reason(module)))
        for name, module in model.named_modules()
    )
    held = _by_layer((name, (tuple(each.shape), each.dtype)) for name, each in parameters.items())
    given = _by_layer((name, (tuple(shape), hf_dtypes[name])) for name, shape in hf_shapes.items())
    identical: dict[_Kind, list[int]] = defaultdict(list)
    for layer in sorted(held.keys() | given.keys()):
        identical[_Kind(*(frozenset(each.get(layer, ())) for each in (modules, held, given)))].append(layer)
    return {layers[0]: layers for layers in identical.values()}


def tensors_of_layers(named: Mapping[str, T], layers: Iterable[int]) -> dict[str, T]:
    """The entries that belong to these layers or to no layer."""
    chosen = {None, *layers}
    return {name: value for name, value in named.items() if _layer(name) in chosen}


def expand_trace(trace: LoadTrace, identical: Mapping[int, Iterable[int]], parameters: Iterable[str]) -> LoadTrace:
    """Expand a trace of the first layer of each kind to the whole model, in the order of `parameters`."""

    def copies(name: str) -> list[str]:
        layer = _layer(name)
        return [name] if layer is None else [_NUMBER.sub(str(number), name, count=1) for number in identical[layer]]

    order = {name: place for place, name in enumerate(parameters)}
    # A parameter that is split along an index appears as several tensors, each with a name of its own.
    shapes = {copy: shape for name, shape in trace.shard.local_shapes.items() for copy in copies(name)}
    names = sorted(shapes, key=lambda name: order[name.partition("[")[0]])
    place = {name: number for number, name in enumerate(names)}
    placements = [
        Placement(hf_name, each.hf_box, local_name, each.local_box)
        for each in trace.shard.placements
        for hf_name, local_name in zip(copies(each.hf_name), copies(each.local_name), strict=True)
    ]
    padding = [
        ((copy, box), value)
        for (name, box), value in zip(trace.shard.padding, trace.padding_values, strict=True)
        for copy in copies(name)
    ]
    dtypes = {copy: dtype for name, dtype in trace.dtypes.items() for copy in copies(name)}
    padding.sort(key=lambda each: place[each[0][0]])
    return replace(
        trace,
        shard=Shard(
            {name: shapes[name] for name in names},
            sorted(placements, key=lambda each: place[each.local_name]),
            [box for box, _ in padding],
        ),
        dtypes={name: dtypes[name] for name in names},
        padding_values=[value for _, value in padding],
        untraced=_copied(trace.untraced, copies),
        refused=_copied(trace.refused, copies),
    )


def _copied(reasons: Mapping[str, str], copies: Callable[[str], list[str]]) -> dict[str, str]:
    return {copy: reason for name, reason in reasons.items() for copy in copies(name)}


def _by_layer(named: Iterable[tuple[str, tuple[Any, ...]]]) -> dict[int, list[tuple[Any, ...]]]:
    """Group entries by layer, with names within the layer; entries of no layer are left out."""
    found: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for name, facts in named:
        layer = _layer(name)
        if layer is not None:
            found[layer].append((_NUMBER.sub("", name, count=1), *facts))
    return found


def _layer(name: str) -> int | None:
    number = _NUMBER.search(name)
    return int(number.group()) if number else None
