"""Reads the overrides of a verl command from a script, a YAML file or words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from converters.errors import UserError
from megarl.config.foreign.arguments import last_program
from megarl.config.foreign.programs import VERL, Trainer
from megarl.config.foreign.shell_script import read_script
from megarl.config.foreign.shell_words import Word
from megarl.config.foreign.verl_config import (
    named_settings,
    read_yaml,
    settings_of_yaml,
    split_options,
    unknown,
)
from megarl.config.foreign.verl_keys import ALIASES
from megarl.config.origins import leaves


@dataclass(frozen=True)
class Settings:
    """Settings of verl, and facts about the command that they are from."""

    values: dict[str, Any]
    """Key -> value."""
    trainer: Trainer = field(default_factory=Trainer)
    """The command's program; verl's own for settings without a program."""
    lost: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> places and names of settings that could not be read."""


def read_settings(given: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read settings of verl from one file or from overrides.

    Raises UserError for a file without a verl command, for a program that trains differently, and for an override
    without a value.
    """
    trainer = Trainer()
    lost: dict[str, list[str]] = {}
    if len(given) == 1 and Path(given[0]).suffix in (".yaml", ".yml"):
        settings = settings_of_yaml(read_yaml(Path(given[0])), Path(given[0]))
    elif len(given) == 1 and "=" not in given[0]:
        script = read_script(Path(given[0]), environment)
        settings = {}
        if program := last_program(script, VERL.counts):
            trainer = VERL.trainer(program.name)
            options, words = split_options(program.words)
            named, lost = named_settings(options)
            settings = {**trainer.defaults, **named, **dict(_overrides(words))}
            lost |= {why: [what] for why, what in trainer.notes.items()}
        lost |= script.uncertain(script.used)
    else:
        settings = dict(_overrides(Word(text, "the command line") for text in given))
    if not settings:
        raise UserError(f"{given[0]} has no settings of verl: name a script that runs verl, a YAML file, or KEY=VALUE")
    return Settings({_name_of_now(key): value for key, value in settings.items()}, trainer, lost)


def _overrides(words: Iterable[Word]) -> Iterator[tuple[str, Any]]:
    for word in words:
        if word.text.startswith("~"):
            raise UserError(
                f"{word.where}: {word.text} takes a setting of verl away; give the value that it is to have"
            )
        key, equals, value = word.text.partition("=")
        Word(key, word.where).known()
        # Hydra's other options do not concern training.
        if not equals or key.startswith(("-", "hydra")):
            continue
        if word.unknown:
            yield key.lstrip("+~"), unknown(key, word)
            continue
        try:
            override = OverridesParser.create().parse_override(word.text)
        except HydraException:
            # The shell has removed the quotes, and Hydra would require its own.
            yield key.lstrip("+~"), value
            continue
        if override.is_sweep_override():
            raise UserError(f"{word.where}: {word.text} gives several values; write one")
        given = override.value()
        if isinstance(given, dict) and given:
            yield from leaves(given, f"{override.key_or_group}.")
        else:
            yield override.key_or_group, given


def _name_of_now(key: str) -> str:
    for old, new in ALIASES.items():
        if key == old or (old.endswith(".") and key.startswith(old)):
            return new + key.removeprefix(old)
    return key
