"""How old tokens are, or get, until they are trained on: no older than the schedule allows."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from operator import attrgetter

from converters.errors import UserError
from megarl.data import PromptGroup, Turn
from megarl.data.stretches import distinct
from megarl.run.schedule import Schedule
from megarl.schema import MegarlConfig

_KEYS = {
    "max_staleness": "schedule.max_staleness",
    "window": "schedule.window",
    "prompts_per_step": "loop.prompts_per_step",
    "in_flight": "schedule.in_flight",
}
"""The keys of the configuration by their names in `schedule_settings`."""


def oldest_version(turns: Iterable[Turn]) -> int | None:
    """The version of the oldest token that was sampled; None if none was."""
    versions = [distinct(turn.versions) for turn in turns]
    return min((int(each.min()) for each in versions if len(each)), default=None)


def oldest_of_group(group: PromptGroup) -> int | None:
    """The version of the oldest token of a group that is trained on."""
    return oldest_version(turn for each in group.trajectories for turn in each.turns)


def check_ages(groups: Iterable[PromptGroup], version: int, bound: int) -> None:
    """Raise RuntimeError if a group that is trained on at `version` has tokens that are older than the `bound`."""
    for group in groups:
        oldest = oldest_of_group(group)
        if oldest is not None and version - oldest > bound:
            raise RuntimeError(
                f"draw {group.ordinal} has tokens of version {oldest}, {version - oldest} versions older than the "
                f"{version} that they would be trained on at, and the schedule allows {bound}"
            )


def schedule_settings(config: MegarlConfig) -> dict[str, int | str]:
    """The schedule as a checkpoint tells of it."""
    return {name: attrgetter(key)(config) for name, key in _KEYS.items()}


def changed_settings(saved: Mapping[str, int | str], config: MegarlConfig) -> str:
    """How the schedule differs from that of an earlier run, as `schedule_settings` gave it; empty if it does not."""
    found = schedule_settings(config).items()
    different = [f"{_KEYS[name]}={now}, was {saved[name]}" for name, now in found if saved[name] != now]
    return "; ".join(different)


def check_room(draws: int, slots: int, config: MegarlConfig) -> None:
    """Raise UserError if the draws of a checkpoint are more than the schedule has slots for."""
    if draws > slots:
        schedule, prompts = config.schedule, config.loop.prompts_per_step
        raise UserError(
            f"the checkpoint has {draws} prompts on their way, and schedule.max_staleness={schedule.max_staleness} with"
            f" loop.prompts_per_step={prompts} has room for {slots}: continue with max_staleness="
            f"{ceil(draws / prompts) - 1} or more"
        )


def check_carried_over(
    oldest: Mapping[int, int | None], schedule: Schedule, changed: str, config: MegarlConfig
) -> None:
    """Raise UserError if tokens of a checkpoint would be too old when the schedule comes to train on them.

    `oldest` has the version of each draw's oldest token.
    """
    latest = schedule.latest_versions()
    told = f" ({changed} in the checkpoint)" if changed else ""
    ages = [latest[draw] - version for draw, version in oldest.items() if version is not None]
    if (age := max(ages, default=0)) > schedule.staleness_bound:
        staleness = age - schedule.staleness_bound + config.schedule.max_staleness
        raise UserError(
            f"the checkpoint has tokens that may be {age} versions old when they are trained on, and this run allows "
            f"{schedule.staleness_bound}{told}: continue with schedule.max_staleness={staleness} or more, or "
            "with the schedule of the checkpoint"
        )


def schedule_change_message(changed: str, finished: Sequence[int], unfinished: Sequence[int]) -> str:
    """A sentence for whoever goes on with another schedule than that of the checkpoint."""
    return (
        f"another schedule than that of the checkpoint ({changed}): the {len(finished)} groups that wait and the "
        f"{len(unfinished)} that were being sampled carry over, and come first"
    )
