"""Scored groups in a checkpoint: they are saved because the weights that sampled them are gone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.data import Prompt, PromptGroup, Trajectory
from megarl.rewards import Score
from megarl.run.checkpoint_files import WriteFile
from megarl.run.saved_turns import SavedTurns, described, save_turns

_FILE = "groups.safetensors"


def save_groups(groups: Sequence[PromptGroup], write: WriteFile) -> list[dict[str, Any]]:
    """Pass the arrays of all turns, if any, to `write`; returns the rest of what `read_groups` needs."""
    save_turns([turn for group in groups for member in group.members for turn in member.turns], _FILE, write)
    return [_described(group) for group in groups]


def read_groups(
    folder: Path, groups: Sequence[Mapping[str, Any]], prompt_of: Callable[[int], Prompt]
) -> list[PromptGroup]:
    """Read the groups that `save_groups` wrote and described; `prompt_of` returns the prompt of an ordinal."""
    turns, found = SavedTurns(folder / _FILE), []
    for each in groups:
        members = [_trajectory(member, turns) for member in each["members"]]
        count = len(members) - each["with_baseline"]
        group = PromptGroup(prompt_of(each["ordinal"]), each["ordinal"])
        found.append(group.with_members(members[:count], *members[count:]))
    return found


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
        "turns": [described(turn) for turn in trajectory.turns],
    }


def _trajectory(trajectory: Mapping[str, Any], turns: SavedTurns) -> Trajectory:
    score = trajectory["score"]
    return Trajectory(
        tuple(turns.next(turn) for turn in trajectory["turns"]),
        trajectory["end"],
        None if score is None else Score(*score),
        trajectory["failure"],
    )
