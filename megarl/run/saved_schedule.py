"""The schedule in a checkpoint: how it differs from that of the run that continues there, and whether it has room."""

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
"""The keys of the configuration by their names in `schedule_settings`."""


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


def schedule_change_message(changed: str, finished: Sequence[int], unfinished: Sequence[int]) -> str:
    """A sentence for whoever goes on with another schedule than that of the checkpoint."""
    return (
        f"another schedule than that of the checkpoint ({changed}): the {len(finished)} groups that wait and the "
        f"{len(unfinished)} that were being sampled carry over, and come first"
    )
