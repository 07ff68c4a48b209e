"""Arguments that the training commands share: a recipe, overrides of it, Megatron's flags."""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megarl.cli.outcome import table
from megarl.output.lock import sole_writer
from megarl.output.places import CHECKPOINTS, EXPORT, LOGS, TRAINED_COMPANIONS
from megarl.process.phase import phase

if TYPE_CHECKING:
    from megarl.schema import MegarlConfig

Part: TypeAlias = Callable[["MegarlConfig"], None]
"""One thing that is done with a configuration: a check, or the whole job."""

_PLAIN_VALUE = re.compile(r"[\w./:+\-]+|\[.*\]|\{.*\}|'.*'|\".*\"")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Declare the options; overrides and Megatron's flags are what remains."""
    parser.usage = f"megarl {command} --config-name NAME [KEY=VALUE ...] [--MEGATRON-FLAG [VALUE] ...]"
    parser.add_argument("--config-name", required=True, metavar="NAME", help="recipe: a file of configs/ without .yaml")
    parser.add_argument("--config-dir", metavar="DIR", help="folder of your own recipes, looked in first")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration as YAML and stop")


def override(key: str, value: object) -> str:
    """A Hydra override that gives `key` exactly this value."""
    text = str(value)
    if _PLAIN_VALUE.fullmatch(text):
        return f"{key}={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def read_config(options: argparse.Namespace) -> "MegarlConfig":
    """The configuration that a command line describes; flags win over overrides. UserError for what is wrong in it."""
    from megarl.config.compose import compose
    from megarl.config.keys import flag_hints
    from megatron_ext.arguments import parse_flags

    flags, overrides = parse_flags(options.overrides, flag_hints())
    overrides += [override(f"megatron.{name}", value) for name, value in flags.items()]
    return compose(options.config_name, overrides, options.config_dir)


def run(options: argparse.Namespace, parts: Callable[[], Iterator[Part]]) -> int:
    """Give the configuration of a command line to each of `parts`, a check and a job, or print it.

    They are made one after the other, so that what the check refuses is refused before the job is imported.
    """
    if options.print_config:
        print_config(read_config(options))
        return 0
    check_and_job = parts()
    with phase("reading the configuration"):
        config = read_config(options)
        next(check_and_job)(config)
    with sole_writer(Path(config.output_dir)):
        with phase("loading the program"):
            job = next(check_and_job)
        job(config)
    print_places(Path(config.output_dir))
    return 0


def print_places(output_dir: Path) -> None:
    """Say where everything is that a run wrote."""
    checkpoints = sorted(output_dir.glob(f"{CHECKPOINTS}/iter_???????"))
    places = {
        "model": output_dir / EXPORT,
        **{name: output_dir / name for name in TRAINED_COMPANIONS},
        "checkpoint": checkpoints[-1] if checkpoints else output_dir / CHECKPOINTS,
        "metrics": output_dir / "metrics.jsonl",
        "tensorboard": output_dir / "tensorboard",
        "logs": output_dir / LOGS,
    }
    print("\n".join(table((name, str(path)) for name, path in places.items() if path.exists())), flush=True)


def print_config(config: "MegarlConfig") -> None:
    """The configuration as YAML, as a recipe would hold it."""
    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(OmegaConf.create(asdict(config))), end="")
