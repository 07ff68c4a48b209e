"""Checks that the files and folders named in a configuration exist, before slow imports."""

import os
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

from converters.errors import UserError
from megarl.config.commands import COMMAND_FACTS
from megarl.config.purpose import commands_of, say_commands
from megarl.output.places import check_name
from megarl.schema import MegarlConfig


def check_input_paths(config: MegarlConfig, command: str) -> None:
    """Raise UserError for a model or data that is not where a command reads it, and for an invalid file name.

    It is fast, so that a typo in a path does not cost the seconds of importing torch.
    """
    check_name("output_dir", config.output_dir)
    if not Path(config.model.path, "config.json").is_file():
        raise UserError(f"model.path={config.model.path} is not a HuggingFace folder: it has no config.json")
    for place, key in enumerate(COMMAND_FACTS[command].files):
        files: list[str] = attrgetter(key)(config)
        if not files and place == 0:
            raise UserError(_why_not_empty(key, config, command))
        _check_files(key, files)


def _why_not_empty(key: str, config: MegarlConfig, command: str) -> str:
    """The message for a list without files; a recipe for another command may have none."""
    commands, example = commands_of(config), f"name at least one parquet file, {key}=[path/to/file.parquet]"
    if key.endswith(".train_files") and command not in commands:
        return f"{key} is empty, and this recipe is for {say_commands(commands)}: run that, or {example}"
    return f"{key} is empty: {example}"


def _check_files(key: str, files: Iterable[str]) -> None:
    for file in files:
        if not os.path.isfile(file):  # unlike Path.is_file, accepts any name
            raise UserError(f"{key}: {_why_no_file(file)}")


def _why_no_file(file: str) -> str:
    if os.path.isdir(file):
        return f"{file} is a folder; name the files in it one by one"
    if "*" in file or "?" in file:
        return f"there is no file {file}, and patterns are not filled in: name the files one by one"
    return f"there is no file {file}"
