"""Turns a command line into a configuration: a recipe, overrides, Megatron's flags."""

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import UserError
from megarl.config.assignment import Assignment, override
from megarl.output.lock import free_folder, sole_writer

__all__ = [
    "add_megatron_args",
    "assignments",
    "base_of",
    "folder_of_its_own",
    "is_scaled",
    "named_overrides",
    "override",
    "print_config",
    "read_config",
    "read_open",
    "refuse_flags",
]
TINY = "tiny"
"""The scale that runs a recipe on a laptop: `+scale=tiny`."""
_NOWHERE = "unwritten"
"""Stands in for the output folder of a command that writes none."""

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
    """The configuration given by a command line. Raises UserError for errors in it."""
    from megarl.config.compose import compose

    script = _read_script(options)
    given = _given(options, script)
    config = compose(options.config_name, [each.text for each in given], options.config_dir)
    if script and Path(config.model.path, "config.json").is_file():
        from megarl.config.foreign.megatron_script import check_model

        check_model(script.model, config.model.path)
    return config


def read_open(options: argparse.Namespace) -> "MegarlConfig":
    """The configuration of a recipe that is planned and not run, with stand-ins for keys that only a run needs.

    The model is given by --model, or else by the recipe. Raises UserError as `read_config` does, and for the tiny
    scale.
    """
    _refuse_scale(options)
    given = [word.partition("=")[0] for word in options.overrides]
    stand_ins = {"model.path": options.model or _named_model(options), "output_dir": _NOWHERE}
    missing = [override(key, value) for key, value in stand_ins.items() if value and key not in given]
    return read_config(argparse.Namespace(**{**vars(options), "overrides": [*missing, *options.overrides]}))


def assignments(options: argparse.Namespace) -> "list[Assignment]":
    """Everything given by a command line, in order of increasing precedence: a script, overrides, flags."""
    return _given(options, _read_script(options))


def _given(options: argparse.Namespace, script: "MegatronScript | None") -> "list[Assignment]":
    scale = _scale(base_of(options)) if is_scaled(options) else []
    return [*scale, *(script.assignments if script else []), *_words(options)]


def refuse_flags(options: argparse.Namespace) -> None:
    """Raise UserError for a flag, in a command that takes overrides but not Megatron's flags."""
    for word in options.overrides:
        if word.startswith("--"):
            raise options.parser.no_option(word)


def is_scaled(options: argparse.Namespace) -> bool:
    """Whether a command line asks for the tiny scale. Raises UserError for another scale."""
    scales = [word.partition("=")[2] for word in options.overrides if word.lstrip("+").startswith("scale=")]
    if unknown := [scale for scale in scales if scale != TINY]:
        raise UserError(f"+scale={unknown[0]} is not known: there is +scale={TINY}")
    return bool(scales)


def _refuse_scale(options: argparse.Namespace) -> None:
    """Raise UserError if a command that plans a recipe is asked for the tiny scale."""
    if is_scaled(options):
        raise UserError(
            f"+scale={TINY} is for the commands that train: megarl plan and rehearse count a recipe at its own size;"
            " leave it out"
        )


def base_of(options: argparse.Namespace) -> "MegarlConfig":
    """The recipe of a command line at its own scale, with stand-ins for open keys."""
    from megarl.config.origins import compose_open

    given = [each.text for each in _words(options)]
    config, open_ = compose_open(options.config_name, given, options.config_dir)
    if "output_dir" in open_:
        config.output_dir = f"runs/{TINY}_{options.config_name}"
    return config


def _named_model(options: argparse.Namespace) -> str | None:
    """The model that a recipe is for, if nothing else gives the model; None if the recipe does not name one."""
    from megarl.config.origins import compose_open

    given = [each.text for each in _words(options)]
    config, open_ = compose_open(options.config_name, given, options.config_dir)
    return config.model.name if "model.path" in open_ else None


def _scale(base: "MegarlConfig") -> "list[Assignment]":
    from megarl.quickstart.scale import tiny

    values = {"output_dir": base.output_dir, **tiny(base)}
    return [
        Assignment(override(key, "null" if value is None else value), f"scale={TINY}") for key, value in values.items()
    ]


def _words(options: argparse.Namespace) -> "list[Assignment]":
    from megarl.config.keys import flag_hints
    from megatron_ext.options.arguments import parse_flags

    flags, overrides = parse_flags(options.overrides, flag_hints(), options.parser.own_options)
    overrides = [text for text in overrides if not text.lstrip("+").startswith("scale=")]
    return [
        *(Assignment(text, "override") for text in overrides),
        *(
            Assignment(override(f"megatron.{name}", value), f"flag --{name.replace('_', '-')}")
            for name, value in flags.items()
        ),
    ]


def _read_script(options: argparse.Namespace) -> "MegatronScript | None":
    """The script of --megatron-args, if the command has this option; ignored arguments are printed."""
    file: Path | None = getattr(options, "megatron_args", None)
    if file is None:
        return None
    from megarl.config.foreign.megatron_script import read_megatron_script

    script = read_megatron_script(file, os.environ)
    for note in script.notes():
        print(f"megarl: {file}: {note}", file=sys.stderr)
    return script


def folder_of_its_own(config: "MegarlConfig", options: argparse.Namespace) -> AbstractContextManager[Path]:
    """Lock the output folder of a command that does not train: the given folder, else an unused one."""
    is_given = options.output_dir or any(word.startswith("output_dir=") for word in options.overrides)
    return (sole_writer if is_given else free_folder)(Path(config.output_dir))


def named_overrides(options: argparse.Namespace, keys: Mapping[str, str]) -> list[str]:
    """Overrides for the given options that set a key: `keys` maps option -> key."""
    given = {key: getattr(options, option.lstrip("-").replace("-", "_")) for option, key in keys.items()}
    return [override(key, value) for key, value in given.items() if value is not None]


def print_config(config: "MegarlConfig") -> None:
    """Print the configuration as YAML, as in a recipe."""
    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(OmegaConf.create(asdict(config))), end="")
