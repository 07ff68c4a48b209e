"""How old tokens are, or get, until they are trained on: no older than the schedule allows."""

from collections.abc import Iterable, Mapping

from converters.errors import UserError
from megarl.data import PromptGroup, Turn
from megarl.data.stretches import distinct
from megarl.run.schedule import Schedule
from megarl.schema import MegarlConfig


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
