"""Compare the schedule in a checkpoint with that of the run that resumes: changed settings, room for its draws."""

from collections.abc import Mapping, Sequence
from math import ceil
from operator import attrgetter

from converters.errors import UserError
from megarl.schema import MegarlConfig

_KEYS = {
    "max_staleness": "schedule.max_staleness",
    "window": "schedule.window",
    "prompts_per_step": "loop.prompts_per_step",
    "in_flight": "schedule.in_flight",
}
"""Name in `schedule_settings` -> key of the configuration."""


def schedule_settings(config: MegarlConfig) -> dict[str, int | str]:
    """Settings of the schedule that a checkpoint keeps."""
    return {name: attrgetter(key)(config) for name, key in _KEYS.items()}


def changed_settings(saved: Mapping[str, int | str], config: MegarlConfig) -> str:
    """Describe how the schedule differs from the `saved` settings of an earlier run; "" if it does not."""
    found = schedule_settings(config).items()
    different = [f"{_KEYS[name]}={now}, was {saved[name]}" for name, now in found if saved[name] != now]
    return "; ".join(different)


def check_room(draws: int, slots: int, config: MegarlConfig) -> None:
    """Raise UserError if a checkpoint has more draws than the schedule has slots."""
    if draws > slots:
        schedule, prompts = config.schedule, config.loop.prompts_per_step
        raise UserError(
            f"the checkpoint has {draws} prompts on their way, and schedule.max_staleness={schedule.max_staleness} with"
            f" loop.prompts_per_step={prompts} has room for {slots}: continue with max_staleness="
            f"{ceil(draws / prompts) - 1} or more"
        )


def schedule_change_message(changed: str, finished: Sequence[int], unfinished: Sequence[int]) -> str:
    """Sentence about resuming with another schedule than that of the checkpoint."""
    return (
        f"another schedule than that of the checkpoint ({changed}): the {len(finished)} groups that wait and the "
        f"{len(unfinished)} that were being sampled carry over, and come first"
    )
