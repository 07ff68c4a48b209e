"""Turns in a checkpoint: their arrays end to end in one file, and of each turn what else there is of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from megarl.data import Turn
from megarl.data.stretches import Array, joined

_ARRAYS = ("prompt_ids", "token_ids", "log_probs", "versions")


def save_turns(turns: Sequence[Turn], file: Path) -> None:
    """Write the arrays of all turns, if there are any."""
    if not turns:
        return
    arrays = {name: joined([(getattr(turn, name),) for turn in turns]) for name in _ARRAYS}
    experts = [joined([turn.routed_experts]) for turn in turns if turn.routed_experts]
    if experts:
        arrays["routed_experts"] = np.concatenate([each.view(np.uint8).reshape(len(each), -1) for each in experts])
    save_file(arrays, file)


def described(turn: Turn) -> list[Any]:
    """All that `SavedTurns.next` needs to know of a turn."""
    return [len(turn.prompt_ids), len(turn.token_ids), turn.finish_reason, bool(turn.routed_experts)]


class SavedTurns:
    """Reads the turns of a file again, in their order."""

    def __init__(self, file: Path) -> None:
        self._arrays: Mapping[str, Array] = load_file(file) if file.exists() else {}
        self._read = dict.fromkeys(self._arrays, 0)

    def next(self, turn: Sequence[Any]) -> Turn:
        """The next turn, as it was `described`."""
        prompt, sampled, finish_reason, with_experts = turn
        prompt_ids, token_ids, log_probs, versions = (
            self._next(name, prompt if name == "prompt_ids" else sampled) for name in _ARRAYS
        )
        experts: tuple[Array, ...] = ()
        if with_experts:
            records = np.ascontiguousarray(self._next("routed_experts", prompt + sampled))
            experts = (records.view(np.dtype((np.void, records.shape[1])))[:, 0],)
        return Turn.of(prompt_ids, token_ids, log_probs, versions, finish_reason, experts)

    def _next(self, name: str, length: int) -> Array:
        start = self._read[name]
        self._read[name] = start + length
        return self._arrays[name][start : start + length]
