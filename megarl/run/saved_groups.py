"""Finished groups in a checkpoint: the weights that sampled them are gone, so they cannot be sampled again."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from megarl.data import Prompt, PromptGroup, Trajectory, Turn
from megarl.data.stretches import Array, joined
from megarl.rewards import Score

_FILE = "groups.safetensors"
_ARRAYS = ("prompt_ids", "token_ids", "log_probs", "versions")


def save_groups(groups: Sequence[PromptGroup], folder: Path) -> list[dict[str, Any]]:
    """Write the arrays of all turns to `folder`, if there are any; the rest of what `read_groups` needs."""
    turns = [turn for group in groups for member in group.members for turn in member.turns]
    if turns:
        arrays = {name: joined([(getattr(turn, name),) for turn in turns]) for name in _ARRAYS}
        experts = [joined([turn.routed_experts]) for turn in turns if turn.routed_experts]
        if experts:
            arrays["routed_experts"] = np.concatenate([each.view(np.uint8).reshape(len(each), -1) for each in experts])
        save_file(arrays, folder / _FILE)
    return [_described(group) for group in groups]


def read_groups(
    folder: Path, described: Sequence[Mapping[str, Any]], prompt_of: Callable[[int], Prompt]
) -> list[PromptGroup]:
    """The groups that `save_groups` wrote and described; `prompt_of` gives the prompt of an ordinal."""
    arrays = _Arrays(load_file(folder / _FILE)) if described else _Arrays({})
    groups = []
    for each in described:
        members = [_trajectory(member, arrays) for member in each["members"]]
        count = len(members) - each["with_baseline"]
        group = PromptGroup(prompt_of(each["ordinal"]), each["ordinal"])
        groups.append(group.with_members(members[:count], *members[count:]))
    return groups


class _Arrays:
    """Reads arrays from their beginning to their end, a stretch after the other."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays, self._read = arrays, dict.fromkeys(arrays, 0)

    def next(self, name: str, length: int) -> Array:
        """The next `length` of an array."""
        start = self._read[name]
        self._read[name] = start + length
        return self._arrays[name][start : start + length]


def _described(group: PromptGroup) -> dict[str, Any]:
    return {
        "ordinal": group.ordinal,
        "with_baseline": group.baseline is not None,
        "members": [_of_trajectory(each) for each in group.members],
    }


def _of_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    score = trajectory.score
    return {
        "end": trajectory.end,
        "score": None if score is None else [score.value, score.parts, score.terms],
        "failure": trajectory.failure,
        "turn_scores": list(trajectory.turn_scores),
        "rollout": trajectory.rollout,
        "turns": [
            [len(turn.prompt_ids), len(turn.token_ids), turn.finish_reason, bool(turn.routed_experts)]
            for turn in trajectory.turns
        ],
    }


def _trajectory(described: Mapping[str, Any], arrays: _Arrays) -> Trajectory:
    score = described["score"]
    return Trajectory(
        tuple(_turn(turn, arrays) for turn in described["turns"]),
        described["end"],
        None if score is None else Score(*score),
        described["failure"],
        tuple(described["turn_scores"]),
        rollout=described["rollout"],
    )


def _turn(described: Sequence[Any], arrays: _Arrays) -> Turn:
    prompt, sampled, finish_reason, with_experts = described
    prompt_ids, token_ids, log_probs, versions = (
        arrays.next(name, prompt if name == "prompt_ids" else sampled) for name in _ARRAYS
    )
    experts: tuple[Array, ...] = ()
    if with_experts:
        records = np.ascontiguousarray(arrays.next("routed_experts", prompt + sampled))
        experts = (records.view(np.dtype((np.void, records.shape[1])))[:, 0],)
    return Turn.of(prompt_ids, token_ids, log_probs, versions, finish_reason, experts)
