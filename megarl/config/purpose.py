"""Finds the commands that a recipe is for: those whose group of keys it sets."""

from collections.abc import Mapping, Sequence
from typing import Any

from converters.errors import UserError
from megarl.schema import MegarlConfig, PreferenceConfig, SftConfig

_OWN_GROUPS: Mapping[str, tuple[Any, Sequence[str]]] = {
    "sft": (SftConfig(), ("sft",)),
    "preference": (PreferenceConfig(), ("dpo", "reward-model", "spin")),
}
"""Group of keys -> its defaults, and the commands that read it."""


def commands_of(config: MegarlConfig) -> Sequence[str]:
    """The commands that train with this configuration, because their group of keys differs from its defaults."""
    for group, (unset, commands) in _OWN_GROUPS.items():
        if getattr(config, group) != unset:
            return commands
    return ("train",)


def say_commands(commands: Sequence[str]) -> str:
    """Format names of commands for a sentence: "megarl dpo, reward-model or spin"."""
    *others, last = commands
    return f"megarl {', '.join(others)} or {last}" if others else f"megarl {last}"


def check_plannable(config: MegarlConfig, recipe: str, command: str) -> None:
    """Raise UserError for a recipe of another command than `megarl train`, whose steps `command` counts."""
    commands = commands_of(config)
    if "train" not in commands:
        raise UserError(
            f"megarl {command} counts a step of megarl train, with its engines and its refit, and recipe {recipe} is"
            f" for {say_commands(commands)}: take a recipe of megarl train"
        )
