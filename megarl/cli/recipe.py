"""From a command line to a configuration: a recipe, overrides of it, Megatron's flags."""

import argparse
import os
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.assignment import Assignment, override
from megarl.output.lock import free_folder, sole_writer

__all__ = ["add_megatron_args", "assignments", "folder_of_its_own", "override", "print_config", "read_config"]

if TYPE_CHECKING:
    from megarl.config.foreign.megatron_script import MegatronScript
    from megarl.schema import MegarlConfig


def add_megatron_args(parser: argparse.ArgumentParser) -> None:
    """Declare `--megatron-args`."""
    parser.add_argument(
        "--megatron-args",
        type=Path,
        metavar="FILE",
        help="take the arguments of a Megatron-LM script or YAML file; overrides and flags win over them",
    )


def read_config(options: argparse.Namespace) -> "MegarlConfig":
    """The configuration that a command line describes. Raises UserError for what is wrong in it."""
    from megarl.config.compose import compose

    script = _read_script(options)
    given = [*(script.assignments if script else []), *_words(options)]
    config = compose(options.config_name, [each.text for each in given], options.config_dir)
    if script and Path(config.model.path, "config.json").is_file():
        from megarl.config.foreign.megatron_script import check_model

        check_model(script.model, config.model.path)
    return config


def assignments(options: argparse.Namespace) -> "list[Assignment]":
    """Everything that a command line gives, in the order in which it counts: a script, overrides, flags."""
    script = _read_script(options)
    return [*(script.assignments if script else []), *_words(options)]


def _words(options: argparse.Namespace) -> "list[Assignment]":
    from megarl.config.keys import flag_hints
    from megatron_ext.arguments import parse_flags

    flags, overrides = parse_flags(options.overrides, flag_hints())
    return [
        *(Assignment(text, "override") for text in overrides),
        *(
            Assignment(override(f"megatron.{name}", value), f"flag --{name.replace('_', '-')}")
            for name, value in flags.items()
        ),
    ]


def _read_script(options: argparse.Namespace) -> "MegatronScript | None":
    """The script of --megatron-args, where the command has one; what is left out of it is said."""
    file: Path | None = getattr(options, "megatron_args", None)
    if file is None:
        return None
    from megarl.config.foreign.megatron_script import read_megatron_script

    script = read_megatron_script(file, os.environ)
    for note in script.notes():
        print(f"megarl: {file}: {note}", file=sys.stderr)
    return script


def folder_of_its_own(config: "MegarlConfig", options: argparse.Namespace) -> AbstractContextManager[Path]:
    """Hold the output folder of a command that trains nothing: the one that is given, else one that nobody uses."""
    is_given = options.output_dir or any(word.startswith("output_dir=") for word in options.overrides)
    return (sole_writer if is_given else free_folder)(Path(config.output_dir))


def print_config(config: "MegarlConfig") -> None:
    """The configuration as YAML, as a recipe would hold it."""
    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(OmegaConf.create(asdict(config))), end="")
