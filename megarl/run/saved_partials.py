"""Unfinished responses in a checkpoint: they continue after their saved tokens, as after the death of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from megarl.cluster.engines.pending_request import PartialTurns
from megarl.rollout.protocol import Request
from megarl.run.checkpoint_files import WriteFile
from megarl.run.saved_turns import SavedTurns, described, save_turns

_FILE = "partials.safetensors"


@dataclass(frozen=True)
class SavedPartial:
    """Partial turns of a request when the run was saved; `request` is a checksum of prompt and sampling parameters."""

    request: int
    turns: PartialTurns

    @classmethod
    def of(cls, request: Request, turns: PartialTurns) -> "SavedPartial":
        """Save `turns` with the checksum of their request."""
        return cls(_checksum(request), turns)

    def behind(self, request: Request) -> PartialTurns:
        """The turns that `request` continues: none if it differs from the saved one, for example in temperature."""
        return self.turns if _checksum(request) == self.request else {}


def save_partials(partials: Mapping[int, Sequence[SavedPartial]], write: WriteFile) -> list[dict[str, Any]]:
    """Pass the arrays of all turns, if any, to `write`; returns the rest of what `read_partials` needs.

    `partials` maps the ordinal of a draw to the partials of its requests.
    """
    save_turns([turn for own in partials.values() for each in own for turn in each.turns.values()], _FILE, write)
    return [{"ordinal": ordinal, "requests": [_described(each) for each in own]} for ordinal, own in partials.items()]


def read_partials(folder: Path, draws: Sequence[Mapping[str, Any]]) -> dict[int, Sequence[SavedPartial]]:
    """Read the partials that `save_partials` wrote and described."""
    turns = SavedTurns(folder / _FILE)
    return {each["ordinal"]: [_saved_partial(request, turns) for request in each["requests"]] for each in draws}


def _described(partial: SavedPartial) -> dict[str, Any]:
    return {
        "request": partial.request,
        "turns": [[sample, *described(turn)] for sample, turn in partial.turns.items()],
    }


def _saved_partial(partial: Mapping[str, Any], turns: SavedTurns) -> SavedPartial:
    return SavedPartial(partial["request"], {sample: turns.next(turn) for sample, *turn in partial["turns"]})


def _checksum(request: Request) -> int:
    """Checksum of the prompt and the sampling parameters."""
    prompt = np.array(request.prompt_token_ids, dtype=np.int32)
    return crc32(repr(request.sampling).encode(), crc32(prompt.tobytes()))
