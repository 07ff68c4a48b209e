"""The layout of an engine's workers, traced: where the engine's own loader puts the HuggingFace tensors.

Instead of a formula, it uses a dry run of the loader, as vLLM's sharded weight transfer does (`sharded_rdt_fake.py`).
New versions, fused parameters and expert placements therefore need no code here.
"""

import pickle
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from converters.boxes import Box, first_overlap
from converters.errors import UserError
from converters.layout import Layout, Placement, Shape, Shard
from converters.layouts.load_tracer import LoadTracer, UntraceableError

LoadWeights = Callable[[Iterator[tuple[str, Tensor]]], object]

_REFUSALS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors that loaders raise for a tensor that does not fit their parameter."""


@dataclass(frozen=True)
class LoadTrace:
    """The effect of one worker's loader: where the tensors' elements go. Small enough to send between processes.

    Example: a worker at TP 2 has placements of `q_proj`, `k_proj` and `v_proj` in its `qkv_proj.weight`, each of half
    the heads, and nothing in `untraced`.
    """

    shard: Shard
    """Placements of HuggingFace tensors in the worker's tensors. A parameter that stacks whole tensors, such as
    experts, counts as several, one per index: `name[3]` (`local_tensors`).
    """
    dtypes: Mapping[str, torch.dtype]
    """Dtypes of the tensors of `shard`."""
    padding_values: Sequence[float]
    """The constants with which the loader fills the boxes of `shard.padding`."""
    untraced: Mapping[str, str]
    """HuggingFace name -> why `shard` does not tell where it goes. Unless this is empty, use the engine's loader."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The tensors of `untraced` that the loader rejects even with values: the engine has another model."""

    def __reduce__(self) -> tuple[Callable[[bytes], "LoadTrace"], tuple[bytes]]:
        # The names of a large model are megabytes, but compress well.
        values = tuple(getattr(self, each.name) for each in fields(self))
        return _unpacked, (zlib.compress(pickle.dumps(values), level=1),)


def _unpacked(values: bytes) -> LoadTrace:
    return LoadTrace(*pickle.loads(zlib.decompress(values)))


@dataclass(frozen=True)
class PackedTrace:
    """A pickled trace, as sent by a worker, because unpickling that of a large model takes half a second.

    Workers with equal traces usually have equal bytes; only the traces themselves can tell for sure.
    """

    pickled: bytes

    @classmethod
    def of(cls, trace: LoadTrace) -> "PackedTrace":
        """Pack `trace`."""
        return cls(pickle.dumps(trace))

    def unpacked(self) -> LoadTrace:
        """Unpack the trace."""
        trace: LoadTrace = pickle.loads(self.pickled)
        return trace


def trace_loading(
    load_weights: LoadWeights,
    parameters: Mapping[str, Tensor],
    hf_shapes: Mapping[str, Shape],
    hf_dtypes: Mapping[str, torch.dtype],
    *,
    excluded: Mapping[str, str] | None = None,
) -> LoadTrace:
    """Run `load_weights` on (name, tensor) pairs without values, and record where each goes.

    `parameters` are the tensors that it fills, on any device; nothing is written to them. It may be called several
    times, each time with tensors not yet offered, because it ends at a tensor that cannot be traced. `excluded` maps
    parameters that do not hold what the loader puts there to the reason.
    """
    excluded = excluded or {}
    tracer = LoadTracer(parameters, excluded)
    refused = {
        name: reason
        for name, reason in _load(load_weights, tracer, hf_shapes, hf_dtypes).items()
        if _refuses_values(load_weights, parameters, name, hf_shapes[name], hf_dtypes[name])
    }
    untraced = dict(tracer.untraced)
    for name, reason in tracer.changed.items():
        untraced |= {copy.hf_name: f"the engine's loader {reason}" for copy in tracer.copies[name]}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, torch.dtype] = {}
    placements: list[Placement] = []
    padding: list[tuple[str, Box]] = []
    values: list[float] = []
    for name, parameter in parameters.items():
        copies = tracer.copies.get(name, [])
        # Number of leading dimensions that the loader indexes away.
        indexed = max(0, parameter.dim() - max((len(copy.hf_box.shape) for copy in copies), default=parameter.dim()))
        for local_name in _indexed_names(name, parameter.shape[:indexed]):
            shapes[local_name], dtypes[local_name] = tuple(parameter.shape[indexed:]), parameter.dtype
        for copy in copies:
            local_name, box = _cut(name, copy.box, indexed)[0]
            if box.shape == copy.hf_box.shape and all(length == 1 for length in copy.box.shape[:indexed]):
                placements.append(Placement(copy.hf_name, copy.hf_box, local_name, box))
            else:
                untraced[copy.hf_name] = f"the engine's loader changes its shape to put it into {name}"
        for box, value in tracer.padding.get(name, ()):
            cuts = _cut(name, box, indexed)
            padding.extend(cuts)
            values.extend([value] * len(cuts))
    if excluded:
        name, reason = next(iter(excluded.items()))
        traced = {placement.hf_name for placement in placements}
        missing = hf_shapes.keys() - traced - untraced.keys()
        untraced |= dict.fromkeys(sorted(missing), f"the engine's loader skips it; it may belong in {name}: {reason}")
    placements = [placement for placement in placements if placement.hf_name not in untraced]
    return LoadTrace(Shard(shapes, placements, padding), dtypes, values, untraced, refused)


def _load(
    load_weights: LoadWeights,
    tracer: LoadTracer,
    hf_shapes: Mapping[str, Shape],
    hf_dtypes: Mapping[str, torch.dtype],
) -> dict[str, str]:
    """Offer every tensor to the loader; when it refuses a tensor, call it again with the remaining tensors.

    A loader may hold tensors back to load them together with others, and forgets them when it is called again. So all
    tensors without a destination are offered a second time, without the refused ones. Returns HuggingFace name ->
    reason for each refused tensor.
    """
    refused = _offer(load_weights, tracer, hf_shapes, hf_dtypes)
    if tracer.untraced:
        traced = {copy.hf_name for copies in tracer.copies.values() for copy in copies}
        known = traced | tracer.untraced.keys()
        left = {name: shape for name, shape in hf_shapes.items() if name not in known}
        refused |= _offer(load_weights, tracer, left, hf_dtypes)
    return refused


def _offer(
    load_weights: LoadWeights,
    tracer: LoadTracer,
    hf_shapes: Mapping[str, Shape],
    hf_dtypes: Mapping[str, torch.dtype],
) -> dict[str, str]:
    """Offer every tensor to the loader once."""
    names, offered = iter(hf_shapes), [""]
    refused: dict[str, str] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            offered[0] = name
            yield name, tracer.follow(name, hf_shapes[name], hf_dtypes[name])

    while hf_shapes:
        offered[0] = ""
        try:
            with torch.no_grad(), _in_this_thread(), tracer:
                load_weights(tensors())
            return refused
        except UntraceableError:
            # The tracer has recorded the reason; continue with the next tensor.
            continue
        except _REFUSALS as error:
            if not offered[0]:
                raise
            said = " ".join(str(error).split())
            reason = f"the engine's loader refuses it: {type(error).__name__}" + (f": {said}" if said else "")
            refused[offered[0]] = tracer.untraced.setdefault(offered[0], reason)
    return refused


def _refuses_values(
    load_weights: LoadWeights, parameters: Mapping[str, Tensor], name: str, shape: Shape, dtype: torch.dtype
) -> bool:
    """Whether the loader also refuses a tensor that has values, so the refusal is not because it computes with them.

    Nothing is written into `parameters`.
    """
    tensor = torch.zeros((), dtype=dtype).expand(tuple(shape))
    try:
        with torch.no_grad(), _in_this_thread(), LoadTracer(parameters, {}):
            load_weights(iter([(name, tensor)]))
    except _REFUSALS:
        return True
    return False


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Run what a loader submits to other threads in this one, the only one in which the tracer is active."""
    submit, caller = ThreadPoolExecutor.submit, threading.get_ident()

    def run(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        if threading.get_ident() != caller:
            return submit(pool, function, *arguments, **named)
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **named))
        return done

    with mock.patch.object(ThreadPoolExecutor, "submit", run):
        yield


def _indexed_names(name: str, lengths: Sequence[int]) -> Iterator[str]:
    for index in product(*map(range, lengths)):
        yield f"{name}[{','.join(map(str, index))}]" if index else name


def _cut(name: str, box: Box, indexed: int) -> list[tuple[str, Box]]:
    """Split a parameter's box by each index of its first `indexed` dimensions."""
    rest = Box(box.start[indexed:], box.stop[indexed:])
    ranges = map(range, box.start[:indexed], box.stop[:indexed])
    return [(f"{name}[{','.join(map(str, index))}]" if index else name, rest) for index in product(*ranges)]


def local_tensors(parameters: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """The tensors of a traced `shard`: views of the worker's `parameters`.

    Raises ValueError if a tensor has another shape than when it was traced.
    """
    tensors = {}
    for name, shape in shard.local_shapes.items():
        tensor = parameters.get(name)
        if tensor is None:
            parameter, _, index = name.removesuffix("]").rpartition("[")
            tensor = parameters[parameter][tuple(map(int, index.split(",")))]
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)} and was traced with {list(shape)}")
        tensors[name] = tensor.detach()
    return tensors


def fill_padding(trace: LoadTrace, parameters: Mapping[str, Tensor]) -> None:
    """Fill the padding with the loader's constants. Placements never touch the padding, so once is enough."""
    tensors = local_tensors(parameters, trace.shard)
    for (name, box), value in zip(trace.shard.padding, trace.padding_values, strict=True):
        tensors[name][box.slices()].fill_(value)


def untraced(traces: Iterable[LoadTrace]) -> dict[str, str]:
    """HuggingFace name -> reason, for all that some worker could not trace. If not empty, use the engine's loader."""
    return {name: reason for trace in traces for name, reason in trace.untraced.items()}


def traced_layout(shards: Sequence[Shard], hf_shapes: Mapping[str, Shape]) -> Layout:
    """Build the layout of the workers of one engine from the shards of their traces.

    Raises UserError if an element of a worker's tensor is filled by nothing or twice, or if no worker has some element
    of a HuggingFace tensor: then model and engine do not match, or the trace was incomplete.
    """
    sound: set[tuple[Shape, tuple[Box, ...]]] = set()
    for rank, shard in enumerate(shards):
        _check_filled_once(rank, shard, sound)
    held: dict[str, set[Box]] = {}
    for shard in shards:
        for placement in shard.placements:
            held.setdefault(placement.hf_name, set()).add(placement.hf_box)
    whole: dict[tuple[Shape, frozenset[Box]], Box | None] = {}
    for name, shape in hf_shapes.items():
        kind = tuple(shape), frozenset(held.get(name, ()))
        if kind not in whole:
            whole[kind] = _uncovered(Box.whole(shape), kind[1])
        if missing := whole[kind]:
            raise UserError(
                f"no worker of the engine holds {_describe(missing)} of {name}: the engine's loader skips it; give the"
                " engine the config.json of the policy"
            )
    return Layout(len(shards), hf_shapes, shards.__getitem__)


def _check_filled_once(rank: int, shard: Shard, sound: set[tuple[Shape, tuple[Box, ...]]]) -> None:
    """Check the shard of one rank. Adds each pair of a shape and its boxes that passes to the cache `sound`."""
    boxes: dict[str, list[Box]] = {name: [] for name in shard.local_shapes}
    for placement in shard.placements:
        boxes[placement.local_name].append(placement.local_box)
    for name, box in shard.padding:
        boxes[name].append(box)
    for name, shape in shard.local_shapes.items():
        kind = tuple(shape), tuple(boxes[name])
        if kind in sound:
            continue
        problem = None
        if overlap := first_overlap(boxes[name]):
            problem = f"{_describe(overlap[0].intersect(overlap[1]) or overlap[0])} of {name} is written twice"
        elif missing := _uncovered(Box.whole(shape), boxes[name]):
            problem = f"{_describe(missing)} of {name} is written by no tensor of the model"
        if problem:
            raise UserError(
                f"worker {rank} of the engine cannot take weights: {problem}; give the engine the config.json of the"
                " policy"
            )
        sound.add(kind)


def _uncovered(box: Box, boxes: Iterable[Box]) -> Box | None:
    """A part of `box` that none of `boxes` covers; None if there is none."""
    left = [box] if box.size else []
    for other in boxes:
        left = [rest for part in left for rest in part.without(other)]
    return left[0] if left else None


def _describe(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True)) + "]"
