"""Age of tokens when they are trained on, and checks that it stays within the bound of the schedule."""

from collections.abc import Iterable, Mapping

from converters.errors import UserError
from megarl.data import PromptGroup, Turn
from megarl.data.stretches import distinct
from megarl.run.schedule import Schedule
from megarl.schema import MegarlConfig


def oldest_version(turns: Iterable[Turn]) -> int | None:
    """Version of the oldest sampled token of `turns`; None without any."""
    versions = [distinct(turn.versions) for turn in turns]
    return min((int(each.min()) for each in versions if len(each)), default=None)


def oldest_of_group(group: PromptGroup) -> int | None:
    """Version of the oldest sampled token in the trajectories of a group; None without any."""
    return oldest_version(turn for each in group.trajectories for turn in each.turns)


def check_ages(groups: Iterable[PromptGroup], version: int, bound: int) -> None:
    """Raise RuntimeError if a group to train on at `version` has tokens more than `bound` versions old."""
    for group in groups:
        oldest = oldest_of_group(group)
        if oldest is not None and version - oldest > bound:
            raise RuntimeError(
                f"draw {group.ordinal} has tokens of version {oldest}, {version - oldest} versions older than the "
                f"{version} that they would be trained on at, and the schedule allows {bound}"
            )


def check_carried_over(
    oldest: Mapping[int, int | None], schedule: Schedule, changed: str, config: MegarlConfig
) -> None:
    """Raise UserError if tokens of a checkpoint may be too old by the time the schedule trains on them.

    `oldest` maps the ordinal of each draw to the version of its oldest token, `changed` lists changed settings of the
    schedule for the message.
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
