"""Rollouts in a checkpoint: the schedule, scored groups, and partial samples of the groups in flight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.data import Prompt, PromptGroup
from megarl.data.sampler import SamplerState
from megarl.run.ages import check_carried_over, oldest_of_group, oldest_version
from megarl.run.checkpoint_files import WriteFile
from megarl.run.saved_groups import read_groups, save_groups
from megarl.run.saved_partials import SavedPartial, read_partials, save_partials
from megarl.run.saved_schedule import changed_settings, check_room, schedule_change_message, schedule_settings
from megarl.run.schedule import Schedule
from megarl.schema import MegarlConfig


@dataclass
class Lengths:
    """Total length of the responses counted so far."""

    tokens: int = 0
    responses: int = 0

    @property
    def mean(self) -> float:
        """Mean tokens of a response; at least one must have been counted."""
        return self.tokens / self.responses

    def count(self, group: PromptGroup) -> None:
        """Count all responses of a group except its baseline."""
        self.tokens += sum(each.sampled_tokens for each in group.trajectories)
        self.responses += len(group.trajectories)


@dataclass(frozen=True)
class SavedRollouts:
    """Groups between draw and training when a run was saved. Schedule and sampler are saved with them."""

    finished: Mapping[int, PromptGroup]
    """Scored groups, by ordinal."""
    awaiting_reward_model: Mapping[int, PromptGroup]
    """Groups that the functions have scored, and the reward model has not, by ordinal."""
    dropped: Sequence[PromptGroup]
    partials: Mapping[int, Sequence[SavedPartial]]
    """Unfinished responses of the other groups, by ordinal."""
    lengths: Mapping[str, Lengths]


def save_rollouts(
    rollouts: SavedRollouts,
    write: WriteFile,
    config: MegarlConfig,
    sampler: SamplerState,
    schedule: Mapping[str, Any],
) -> dict[str, Any]:
    """Pass groups and partial responses to `write`; returns the rest of what `read_rollouts` needs.

    `sampler` and `schedule` are their state dicts.
    """
    groups = [*rollouts.finished.values(), *rollouts.awaiting_reward_model.values(), *rollouts.dropped]
    return {
        "sampler": sampler,
        "schedule": {**schedule, "settings": schedule_settings(config)},
        "groups": save_groups(groups, write),
        "dropped": [group.ordinal for group in rollouts.dropped],
        "partials": save_partials(rollouts.partials, write),
        "lengths": {name: asdict(each) for name, each in rollouts.lengths.items()},
    }


def read_rollouts(
    folder: Path,
    state: Mapping[str, Any],
    config: MegarlConfig,
    schedule: Schedule,
    prompt_of: Callable[[int], Prompt],
) -> SavedRollouts:
    """Read what `save_rollouts` wrote, and load its state into `schedule`; `prompt_of` gives the prompt of an ordinal.

    Prints a line if settings of the schedule have changed. Raises UserError if the schedule has too few slots, or would
    train on tokens that are older than it allows.
    """
    changed = changed_settings(state["schedule"]["settings"], config)
    check_room(len(state["schedule"]["draws"]), schedule.slots, config)
    schedule.load_state_dict(state["schedule"])
    groups = read_groups(folder, state["groups"], prompt_of)
    finished, dropped = set(schedule.waiting), set(state["dropped"])
    rollouts = SavedRollouts(
        finished={group.ordinal: group for group in groups if group.ordinal in finished},
        awaiting_reward_model={group.ordinal: group for group in groups if group.ordinal not in finished | dropped},
        dropped=[group for group in groups if group.ordinal in dropped],
        partials=read_partials(folder, state["partials"]),
        lengths={name: Lengths(**each) for name, each in state["lengths"].items()},
    )
    scored = {**rollouts.finished, **rollouts.awaiting_reward_model}
    oldest = {ordinal: oldest_of_group(group) for ordinal, group in scored.items()} | {
        ordinal: oldest_version(turn for each in own for turn in each.turns.values())
        for ordinal, own in rollouts.partials.items()
    }
    check_carried_over(oldest, schedule, changed, config)
    if changed:
        print(schedule_change_message(changed, schedule.waiting, schedule.unfinished), flush=True)
    return rollouts
