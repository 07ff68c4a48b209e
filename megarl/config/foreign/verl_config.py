"""Reads the file of settings that a verl command names with `--config-name`, unless it is verl's own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from converters.errors import UserError
from megarl.config.foreign.given_file import read_given, yaml_errors_in_a_sentence
from megarl.config.foreign.shell_words import Word
from megarl.config.origins import OPEN, leaves

_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("--config-name", "-cn"), "name"),
    **dict.fromkeys(("--config-path", "-cp", "--config-dir", "-cd"), "folder"),
}
"""Hydra's option -> what it gives: the file's name or its folder."""
OWN = frozenset(
    (
        *("_self_", "ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "entropy_trainer"),
        *("one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer", "transfer_queue_ppo_trainer"),
        *("transfer_queue_ppo_megatron_trainer", "dapo_transfer_queue_trainer"),
    )
)
"""Names of verl's own files, whose settings are its defaults."""
MAY_BE_OPEN = (
    *("actor_rollout_ref.model.path", "data.train_files", "data.val_files", "trainer.default_local_dir"),
    *("trainer.project_name", "trainer.experiment_name", "critic.model.path"),
)
"""Keys that a recipe leaves open if their values are unknown without running the script."""


@dataclass(frozen=True)
class Unknown:
    """A value that is unknown without running the script, and matters only if it is needed."""

    word: Word

    def __str__(self) -> str:
        return self.word.unknown


def unknown(key: str, word: Word) -> Any:
    """The value of a key if it is unknown without running the script."""
    return OPEN if key in MAY_BE_OPEN else Unknown(word)


def split_options(words: Iterable[Word]) -> tuple[dict[str, Word], list[Word]]:
    """Separate the name and folder of the command's file from its other words."""
    options: dict[str, Word] = {}
    others: list[Word] = []
    expected = ""
    for word in words:
        option, equals, value = word.text.partition("=")
        if expected:
            options[expected], expected = word, ""
        elif option in _OPTIONS and equals:
            options[_OPTIONS[option]] = Word(value, word.where)
        elif option in _OPTIONS:
            expected = _OPTIONS[option]
        else:
            others.append(word)
    return options, others


def named_settings(options: Mapping[str, Word]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The settings of the named file, and, by reason, the names of missing files.

    Raises UserError for an unknown name.
    """
    lost: dict[str, list[str]] = {}
    if "name" not in options:
        return {}, lost
    name = options["name"].known()
    return _of_file(name, options.get("folder", Word("", "")), lost, ()), lost


def _of_file(name: str, folder: Word, lost: dict[str, list[str]], above: tuple[Path, ...]) -> dict[str, Any]:
    """The settings of a file, which the files `above` include. Later names in its `defaults` win, as in Hydra."""
    stem = name.removesuffix(".yaml")
    if stem in OWN:
        return {"actor_rollout_ref.actor.strategy": "megatron"} if "megatron" in stem else {}
    file = Path(folder.text, f"{stem}.yaml")
    if folder.unknown or not file.is_absolute() or not file.is_file():
        where = folder.unknown or folder.text or "."
        lost.setdefault(f"there is no such file in {where}, and its settings are left out", []).append(f"{stem}.yaml")
        return {}
    if file in above:
        raise UserError(f"{file} names itself in its defaults: take the name out")
    values = read_yaml(file)
    values.pop("hydra", None)
    names = values.pop("defaults", None) or []
    if not isinstance(names, list):
        raise UserError(f"defaults of {file} are no list of names: write one")
    found: dict[str, Any] = {}
    for each in names if "_self_" in names else [*names, "_self_"]:
        is_self = each == "_self_"
        found |= settings_of_yaml(values, file) if is_self else _of_file(str(each), folder, lost, (*above, file))
    return found


def read_yaml(file: Path) -> dict[str, Any]:
    """The groups in a file. Raises UserError for a file without any."""
    with yaml_errors_in_a_sentence(file):
        # With Hydra's loader, which reads 1e-6 as a number; for YAML itself it is text.
        values = yaml.load(read_given(file), Loader=get_yaml_loader())
    if not isinstance(values, dict):
        raise UserError(f"{file} has no settings of verl: YAML with groups of keys belongs there")
    return values


def settings_of_yaml(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Keys and values of groups; a value that refers to another one is unknown."""
    return {
        key: unknown(key, Word.missing(value, str(file))) if isinstance(value, str) and "${" in value else value
        for key, value in leaves(values)
    }
