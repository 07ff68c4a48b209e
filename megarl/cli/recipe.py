"""From a command line to a configuration: a recipe, overrides of it, Megatron's flags."""

import argparse
import re
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.output.lock import free_folder, sole_writer

if TYPE_CHECKING:
    from megarl.config.origins import Assignment
    from megarl.schema import MegarlConfig

_PLAIN_VALUE = re.compile(r"[\w./:+\-]+|\[.*\]|\{.*\}|'.*'|\".*\"")


def override(key: str, value: object) -> str:
    """A Hydra override that gives `key` exactly this value."""
    text = str(value)
    if _PLAIN_VALUE.fullmatch(text):
        return f"{key}={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def read_config(options: argparse.Namespace) -> "MegarlConfig":
    """The configuration that a command line describes. Raises UserError for what is wrong in it."""
    from megarl.config.compose import compose

    return compose(options.config_name, [each.text for each in assignments(options)], options.config_dir)


def assignments(options: argparse.Namespace) -> "list[Assignment]":
    """What a command line gives, in the order in which it counts: flags win over overrides."""
    from megarl.config.keys import flag_hints
    from megarl.config.origins import Assignment
    from megatron_ext.arguments import parse_flags

    flags, overrides = parse_flags(options.overrides, flag_hints())
    return [
        *(Assignment(text, "override") for text in overrides),
        *(
            Assignment(override(f"megatron.{name}", value), f"flag --{name.replace('_', '-')}")
            for name, value in flags.items()
        ),
    ]


def folder_of_its_own(config: "MegarlConfig", options: argparse.Namespace) -> AbstractContextManager[Path]:
    """Hold the output folder of a command that trains nothing: the one that is given, else one that nobody uses."""
    is_given = options.output_dir or any(word.startswith("output_dir=") for word in options.overrides)
    return (sole_writer if is_given else free_folder)(Path(config.output_dir))


def print_config(config: "MegarlConfig") -> None:
    """The configuration as YAML, as a recipe would hold it."""
    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(OmegaConf.create(asdict(config))), end="")
