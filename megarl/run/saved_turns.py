"""Turns in a checkpoint: their arrays end to end in one file, and of each turn what else there is of it."""

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
# Turns whose arrays are fetched together: those of all may be larger than the memory, and one by one would take long.
_AT_ONCE = 16


def save_turns(turns: Sequence[Turn], name: str, write: WriteFile) -> None:
    """Let the arrays of all turns be written to a file, if there are any; no more than a few are copied at a time."""
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
    """All that `SavedTurns.next` needs to know of a turn."""
    return [len(turn.prompt_ids), len(turn.token_ids), turn.finish_reason, bool(turn.routed_experts)]


class SavedTurns:
    """Reads the turns of a file again, in their order; of the file no more than a turn is in memory at a time."""

    def __init__(self, file: Path) -> None:
        self._arrays: dict[str, Any] = {}
        if file.exists():
            opened = safe_open(file, framework="numpy")
            self._arrays = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        self._read = dict.fromkeys(self._arrays, 0)

    def next(self, turn: Sequence[Any]) -> Turn:
        """The next turn, as it was `described`; its experts are in the object store, as those from an engine are."""
        prompt, sampled, finish_reason, with_experts = turn
        prompt_ids, token_ids, log_probs, versions = (
            self._next(name, prompt if name == "prompt_ids" else sampled) for name in _ARRAYS
        )
        experts: Values = ()
        if with_experts:
            records = np.ascontiguousarray(self._next(_EXPERTS, prompt + sampled))
            # Every batch that has the turn sends them, several times: they are far larger than all else of it.
            experts = (stored(records.view(np.dtype((np.void, records.shape[1])))[:, 0]),)
        return Turn.of(prompt_ids, token_ids, log_probs, versions, finish_reason, experts)

    def _next(self, name: str, length: int) -> Array:
        start = self._read[name]
        self._read[name] = start + length
        if length:
            return self._arrays[name][start : start + length]
        # Safetensors (0.8) has no empty part of the end of an array.
        return np.empty((0, *self._arrays[name].get_shape()[1:]), dtype=np.uint8)
