"""Turns in a checkpoint: their arrays end to end in one file, and a description of each turn."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from converters.formats.safetensors import place_tensors
from megarl.data import Turn
from megarl.data.stretches import Array, Values, fetch_each, stored
from megarl.run.checkpoint_files import Piece, WriteFile

_ARRAYS: Mapping[str, torch.dtype] = {
    "prompt_ids": torch.int32,
    "token_ids": torch.int32,
    "log_probs": torch.float32,
    "versions": torch.int32,
}
_EXPERTS = "routed_experts"
# Turns whose arrays are fetched together: all at once may exceed the memory, and one at a time is slow.
_AT_ONCE = 16


def save_turns(turns: Sequence[Turn], name: str, write: WriteFile) -> None:
    """Pass the arrays of all turns, if any, to `write` as one file; only a few turns are copied at a time."""
    if turns:
        write(name, _content(turns))


def _content(turns: Sequence[Turn]) -> Iterator[Piece]:
    values: dict[str, Sequence[Values]] = {name: [(getattr(turn, name),) for turn in turns] for name in _ARRAYS}
    shapes: dict[str, tuple[int, ...]] = {name: (_length(each),) for name, each in values.items()}
    if experts := [turn.routed_experts for turn in turns if turn.routed_experts]:
        values[_EXPERTS] = experts
        shapes[_EXPERTS] = _length(experts), np.dtype(experts[0][0].dtype).itemsize
    start, places = place_tensors(shapes, {**_ARRAYS, _EXPERTS: torch.uint8})
    yield start
    for name in places:
        for array in _fetched(values[name]):
            yield np.ascontiguousarray(array).data


def _length(sequences: Sequence[Values]) -> int:
    return sum(len(stretch) for values in sequences for stretch in values)


def _fetched(sequences: Sequence[Values]) -> Iterator[Array]:
    for first in range(0, len(sequences), _AT_ONCE):
        yield from chain.from_iterable(fetch_each(sequences[first : first + _AT_ONCE]))


def described(turn: Turn) -> list[Any]:
    """Describe a turn for `SavedTurns.next`."""
    return [len(turn.prompt_ids), len(turn.token_ids), turn.finish_reason, bool(turn.routed_experts)]


class SavedTurns:
    """Reads back the turns of a file in order, one turn in memory at a time."""

    def __init__(self, file: Path) -> None:
        self._arrays: dict[str, Any] = {}
        if file.exists():
            opened = safe_open(file, framework="numpy")
            self._arrays = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        self._read = dict.fromkeys(self._arrays, 0)

    def next(self, turn: Sequence[Any]) -> Turn:
        """Read the next turn, given its description by `described`; its experts go into the object store."""
        prompt, sampled, finish_reason, with_experts = turn
        prompt_ids, token_ids, log_probs, versions = (
            self._next(name, prompt if name == "prompt_ids" else sampled) for name in _ARRAYS
        )
        experts: Values = ()
        if with_experts:
            records = np.ascontiguousarray(self._next(_EXPERTS, prompt + sampled))
            # Stored, as they come from an engine: they are far larger than the rest of a turn, and sent several times.
            experts = (stored(records.view(np.dtype((np.void, records.shape[1])))[:, 0]),)
        return Turn.of(prompt_ids, token_ids, log_probs, versions, finish_reason, experts)

    def _next(self, name: str, length: int) -> Array:
        start = self._read[name]
        self._read[name] = start + length
        if length:
            return self._arrays[name][start : start + length]
        # Safetensors 0.8 cannot slice an empty part at the end of an array.
        return np.empty((0, *self._arrays[name].get_shape()[1:]), dtype=np.uint8)
